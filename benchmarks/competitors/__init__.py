"""Competitors: batching by hand in plain PyTorch, and the algorithms of other libraries."""
