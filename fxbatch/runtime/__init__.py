"""Runs plans: buffers, operations compiled per signature, the loop, the autograd function, caches."""
