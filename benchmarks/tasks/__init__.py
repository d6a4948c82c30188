"""The tasks of the benchmarks, one a file; registry.py lists them."""
