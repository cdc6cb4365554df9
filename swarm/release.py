"""Which release of the program this is."""

from importlib.metadata import version

VERSION = version("spes-node")
