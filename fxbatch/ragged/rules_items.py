"""Operators whose first dimension is a batch already: the images of all instances' bags become one batch of images.

In: a convolution, pooling or normalisation over `[T, channels, ...]` of each instance. Out: one call of it on
`[sum of T, channels, ...]`.
"""

from __future__ import annotations

import torch
from torch import fx

from fxbatch.ragged.expressions import depends
from fxbatch.ragged.lower import PACKED, WHOLE, Packed, PackedTape, operator_of, own_dimensions, shape_of
from fxbatch.torch_private import tree_leaves


def of_aten(*names: str) -> frozenset[str]:
    """The full names of operators."""
    return frozenset(f"aten::{name}" for name in names)


ITEMWISE_COMPOSITES = of_aten(
    "batch_norm", "group_norm", "instance_norm", "bilinear",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d",
)  # fmt: skip
_ITEMWISE = ITEMWISE_COMPOSITES | of_aten(
    "conv1d", "convolution", "_convolution_mode", "pad", "grid_sampler_2d", "grid_sampler_3d",
    *(f"avg_pool{d}d" for d in (1, 2, 3)), *(f"max_pool{d}d_with_indices" for d in (2, 3)),
    *(f"_adaptive_avg_pool{d}d" for d in (2, 3)), *(f"adaptive_max_pool{d}d" for d in (2, 3)),
)  # fmt: skip
_OF_MATRICES = of_aten(
    "_linalg_solve_ex", "linalg_inv_ex", "_linalg_det", "_linalg_slogdet", "linalg_qr", "linalg_cholesky_ex",
    "_linalg_eigh", "_linalg_svd", "linalg_solve_triangular", "triangular_solve", "cholesky_solve",
    "linalg_lu_factor_ex", "linalg_lu", "linalg_lu_solve", "linalg_householder_product", "linalg_matrix_exp",
    "cholesky_inverse", "linalg_pinv", "linalg_eig",
)  # fmt: skip


def results_of(node: fx.Node) -> list[torch.Tensor]:
    """The tensors that a node gives, as they were traced."""
    val = node.meta["val"]
    return [x for x in (val if isinstance(val, (tuple, list)) else (val,)) if isinstance(x, torch.Tensor)]


def by_items(tape: PackedTape, node: fx.Node, values: list[Packed]) -> bool:
    """Whether each item along the first dimension, which alone differs between instances, is worked on by itself."""
    target = operator_of(node)
    name = target._schema.name
    if name not in _ITEMWISE and (name not in _OF_MATRICES or any(v.rank < 3 for v in values if v.axes)):
        return False
    a = tape.bound(node)
    if a.get("training") or (a.get("use_input_stats") and a.get("running_mean") is not None):
        return False  # statistics of all items
    if name == "aten::pad" and len(a["pad"]) >= 2 * a["self"].rank:
        return False  # along the items
    sized = [v for v in values if v.layout != WHOLE]
    shapes = [v.shape for v in sized] + [shape_of(t) for t in results_of(node)]
    numbers = [x for x in tree_leaves(a) if not isinstance(x, Packed)]
    return (
        bool(sized)
        and all(v.layout == PACKED for v in sized)
        and all(own_dimensions(s) == (0,) and s[0] == shapes[0][0] for s in shapes)
        and not any(depends(x) for x in numbers)
    )
