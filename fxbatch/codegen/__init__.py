"""Operation graphs, kernels, step functions and native programs."""
