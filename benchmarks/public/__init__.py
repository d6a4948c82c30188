"""Models of public repositories, written for one instance by others than the authors of fxbatch.

Their code is not here. What is: which repository and commit, the edits that today's torch or fxbatch forces,
made-up data, and a driver
that calls the model for one instance as the repository's own training loop does. `python -m benchmarks --task public`.
"""
