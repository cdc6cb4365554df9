"""`python -m node` is `spes-node`."""

from node.cli import main

main()
