"""Models as users of PyG, Transformers or vmap write them: equal to the loop in float64, and packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxbatch import mistakes
from fxbatch.errors import InternalWarning
from fxbatch.ragged.lengths import Lengths
from tests.oracle import run, to_double
from tests.ragged import public_style_models
from tests.ragged.library_style_models import CASES, LINEAR, D, K
from tests.ragged.own_size_models import rows
from tests.ragged.test_own_size_models import inferred
from tests.ragged.test_packed_forward import packed_of, route_of, variants_of
from tests.trust.programs import model

EVERY = {**CASES, **public_style_models.CASES}
RECORDED = {  # their code asks for sizes as plain numbers, or for a view that there is for no size but one
    "long convolution", "pairs of rows",
}  # fmt: skip
ALONE = {  # one operator of theirs runs instance by instance
    "graph U-net", "U-net in one dimension", "norm of all rows", "normalised adjacency", "interpolated", "stretched",
    "overlaps", "relative shift", "span scores", "arc loss", "standardised sets", "x-vector",
    "dynamic graph", "point transformer", "mention pairs",
    "DiffPool", "adaptive pooling", "pyramid pooling", "normalised scores",
}  # fmt: skip
if torch.__version__ < "2.12":  # whose spectra take sizes that are symbols
    RECORDED.remove("long convolution")
    ALONE.add("long convolution")


def check_in_double(made: Any, instances: list[Any], *, gradients: bool) -> None:
    """Values and gradients of a model in float64 against its undecorated forward."""
    plain = type(made).forward.__wrapped__
    found = run(made, [instances], gradients=gradients)

    def loop(given: list[Any]) -> list[Any]:
        return [plain(made, x) for x in given]

    loop.__self__ = made  # type: ignore[attr-defined]
    for a, b in zip(found, run(loop, [instances], gradients=gradients), strict=True):
        assert (a is None) == (b is None) or not (b if a is None else a).any()  # type: ignore[union-attr]
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", EVERY)
def test_library_style_models(name: str) -> None:
    case = EVERY[name]
    torch.manual_seed(0)
    made = to_double(model(case.forward, case.parts(), adaptive=False, out="list"))
    for sizes in case.sizes:
        check_in_double(made, to_double([case.make(t) for t in sizes]), gradients=True)
    if inferred(made, name, EVERY):
        with torch.no_grad():
            check_in_double(made.eval(), to_double([case.make(t) for t in case.sizes[0]]), gradients=False)
    packed: Any = route_of(made).forward
    families = [] if packed is None else list(packed.families.values())
    assert families or route_of(made).code.reason
    assert all(bool(f.reason) == (name in RECORDED) for f in families), [f.reason for f in families]
    assert any(v.function.lowered.alone for v in variants_of(made)) == (name in ALONE)


def test_a_size_that_a_guard_says_is_a_number_is_one_everywhere() -> None:
    """`if len(x) // 2 == 1` makes of three rows' odd ones a tensor of one row."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        odd = self.l(x[1::2])
        return self.out(odd.sum(0) if len(x) // 2 == 1 else odd.mean(0))

    made = to_double(model(forward, LINEAR(), adaptive=False, out="list"))
    for sizes in ((4, 7, 2, 5), (3, 3, 2), (3, 1, 6), (5, 3, 3)):
        check_in_double(made, to_double([rows(t) for t in sizes]), gradients=True)


def test_rows_at_places_that_are_sizes() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        scores = self.l(x) @ x.t()
        middle = len(x) // 2
        return self.out(x[middle] + self.table[len(x)]) + scores[middle, len(x) - 1] + scores[:, middle].sum()

    parts = {**LINEAR(), "table": torch.nn.Parameter(torch.randn(12, D))}
    made = to_double(model(forward, parts, adaptive=False, out="list"))
    for sizes in ((4, 7, 2, 5), (3, 1, 6)):
        check_in_double(made, to_double([rows(t) for t in sizes]), gradients=True)
    assert [len(f.variants) for f in packed_of(made).families.values()] == [1]
    assert made([rows(t).double() for t in (4, 9)])[0].shape == (K,)


def test_a_wrong_rule_is_found_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Lengths.sum
    monkeypatch.setattr(Lengths, "sum", lambda self, rows: plain(self, rows) * 2)
    made = to_double(
        model(lambda self, x: self.out(torch.tanh(x).sum(0)), LINEAR(), adaptive=False, out="list")
    )
    monkeypatch.setattr(mistakes, "_warned", set())
    with pytest.warns(InternalWarning, match="differs from the loop"):
        check_in_double(made, to_double([rows(t) for t in (4, 7, 2)]), gradients=True)
    assert not variants_of(made)
