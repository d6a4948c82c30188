"""Operation graphs, kernels, and the two kinds of emitted module (looped, unrolled)."""
