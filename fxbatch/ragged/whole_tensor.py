"""Functions of torch whose result or gradient at one element depends on the tensor around it: how many elements it
has, which are equal, whether any is zero.

In: the rows of all instances, or a padded tensor. Out: what torch gives of each instance by itself. The padded form is
taken where that can't be told apart; else torch computes the instances that matter, those of one size together.

    product_of_rows(rows, size, "cumprod")            # [total, ...]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxbatch.ragged.lengths import Lengths


def norm(padded: torch.Tensor, order: float, size: Lengths) -> torch.Tensor:
    """The vector norm over the first dimension after the instances, whose padding is zero.

    The norm of one number is its absolute value, where the root of its square overflows.
    """
    norms = torch.linalg.vector_norm(padded, order, 1)
    single = size.sizes == 1
    if not single.any() or size.longest == 1:
        return norms
    instances = torch.from_numpy(single.nonzero()[0]).to(padded.device)
    numbers = padded.index_select(0, instances).narrow(1, 0, 1)
    return norms.index_copy(0, instances, torch.linalg.vector_norm(numbers, order, 1))


def product(rows: torch.Tensor, sizes: Sequence[int], dim: int, how: str) -> torch.Tensor:
    """prod or cumprod along a dimension of [total, ...] that is not the first.

    sizes: how many rows each instance has. Torch's gradient is another formula where a tensor has a zero.
    """
    whole: torch.Tensor = getattr(rows, how)(dim)
    if not _at_the_edge(rows, whole):
        return whole
    return torch.cat([getattr(part, how)(dim) for part in rows.split(list(sizes))])


def product_of_rows(rows: torch.Tensor, size: Lengths, how: str) -> torch.Tensor:
    """prod over the rows of each instance, [total, ...] => [n, ...], or cumprod along them."""
    padded: torch.Tensor = getattr(size.pad(rows, 1), how)(1)
    whole = padded if how == "prod" else size.unpad(padded)
    if not _at_the_edge(rows, padded):
        return whole
    parts = [getattr(part, how)(0) for part in rows.split(size.list)]
    return torch.stack(parts) if how == "prod" else torch.cat(parts)


def _at_the_edge(factors: torch.Tensor, products: torch.Tensor) -> bool:
    """Whether the gradient of a product depends on more than the factors in it."""
    if not (factors.is_floating_point() and torch.is_grad_enabled() and factors.requires_grad):
        return False
    return bool((factors == 0).any() or not products.isfinite().all())


def topk(padded: torch.Tensor, size: Lengths, count: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and places of the first `count` rows of [n, longest, ...]; padding is what comes last. The rows become the
    last dimension.

    Which of several equal numbers come first is what torch.topk chooses for so many elements.
    """
    elements = padded.movedim(1, -1)
    values, places = elements.sort(dim=-1, descending=largest, stable=True)
    first = values.detach()[..., : count + 1]
    neighbours = first[..., 1:], first[..., :-1]
    equal = neighbours[0] == neighbours[1]
    if first.is_floating_point():
        equal = equal | neighbours[0].isnan() & neighbours[1].isnan()
    places = places[..., :count]
    if not equal.any():
        return values[..., :count], places
    chosen = places.clone()
    for length in sorted(set(size.list)):
        same = torch.from_numpy((size.sizes == length).nonzero()[0]).to(padded.device)
        some = elements.detach().index_select(0, same)[..., :length]
        chosen[same] = some.topk(count, dim=-1, largest=largest)[1]
    return elements.gather(-1, chosen), chosen
