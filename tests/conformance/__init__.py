"""PyTorch's operator and module databases against the loop: `python -m tests.conformance`.

Every entry with tensor input is called per instance inside an autobatched function, with three instances
whose values (and, for half of the samples, shapes) differ; results and gradients must equal the loop's.
"""
