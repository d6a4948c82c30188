"""The only module that imports private torch APIs; each line says the versions it was checked against.

`tests/test_torch_private.py` fails with a clear message when one of them moves.
"""

from __future__ import annotations

# Checked against 2.11.0 and 2.13.0.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Checked against 2.11.0 and 2.13.0: flattening of nested containers, as torch.vmap does it.
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TreeSpec",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]
