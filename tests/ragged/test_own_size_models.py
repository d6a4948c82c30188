"""Models that nobody had in mind when the rules were written: equal to the loop, and packed unless it is said here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from tests.oracle import check_equal
from tests.ragged.own_size_models import CASES
from tests.ragged.test_packed_forward import packed_of
from tests.trust.programs import model

RECORDED = {"CRF", "spans"}  # loops over a size
ALONE = {  # a diagonal of scores, variances of rows, neighbours, as many rows as the instance says
    "pairwise scores", "mixture", "statistics pooling", "edge convolution", "top-k pooling", "Laplacian",
}  # fmt: skip
READ_THE_MODE = (
    nn.Dropout,
    nn.MultiheadAttention,
    nn.RNNBase,
)  # others do in evaluation what they do in training


def inferred(made: nn.Module, name: str, cases: Iterable[str]) -> bool:
    """Whether a model runs in evaluation too, which is a graph of its own, of the same rules: those that read the mode,
    and every fourth of the others."""
    return name in list(cases)[::4] or any(isinstance(m, READ_THE_MODE) for m in made.modules())


@pytest.mark.parametrize("name", CASES)
def test_own_size_models(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    made = model(case.forward, case.parts(), adaptive=False, out="list")
    for sizes in case.sizes:
        check_equal(made, [case.make(t) for t in sizes])
    if inferred(made, name, CASES):
        made.eval()
        with torch.no_grad():
            check_equal(made, [case.make(t) for t in case.sizes[0]], gradients=False)
    if name == "documents":  # a list of sentences each
        return
    families: list[Any] = list(packed_of(made).families.values())
    assert all(bool(f.reason) == (name in RECORDED) for f in families), [f.reason for f in families]
    alone = [v.function.lowered.alone for f in families for v in f.variants]
    assert any(alone) == (name in ALONE), alone


@pytest.mark.parametrize("name", ["GCN", "DETR", "biaffine", "sinusoids"])
def test_with_options_as_they_are(name: str) -> None:
    case = CASES[name]
    made = model(case.forward, case.parts(), out="list")
    for sizes in case.sizes:
        check_equal(made, [case.make(t) for t in sizes])
