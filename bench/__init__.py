"""Benchmarks: each is a program of its own that prints its figures and leaves them in bench/results."""
