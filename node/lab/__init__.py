"""Networks for tests and benchmarks: hosts with lines of their own, all on this machine (Linux, root)."""
