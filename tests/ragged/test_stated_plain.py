"""`plain=True`: a forward whose source doesn't show that it is plain is packed, since its user says so."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxbatch
from tests.ragged.test_packed_forward import packed_of

LOCK = threading.Lock()


class Configuration:
    """What libraries hand around: an object with hooks of its own, which can't be compared."""

    def __getattr__(self, name: str) -> Any:
        if name != "scale":
            raise AttributeError(name)
        return 2.0


class LibraryModel(nn.Module):
    """As large libraries write it: a lock, a configuration object, attributes by name, an import on the way."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.net, self.configuration, self.bias = nn.Linear(4, 4), Configuration(), 1.0
        kind = type(
            "Decorated", (LibraryModel,), {"forward": fxbatch.autobatch(**options)(LibraryModel.forward)}
        )
        self.__class__ = kind

    def forward(self, x: Tensor) -> Tensor:
        with LOCK:
            known = hasattr(self.configuration, "scale")
        try:
            scale = getattr(self.configuration, "scale")  # noqa: B009 - as they write it
        finally:
            known = bool(known)
        return (torch.tanh(self.net(x)) * scale + self.bias).mean(0) if known else x.mean(0)


def sentences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, 4, generator=generator) for n in (3, 5, 2, 5)]


def alone(model: LibraryModel) -> Tensor:
    return torch.stack([LibraryModel.forward(model, x) for x in sentences()])


def test_what_is_stated_plain_is_packed_with_the_values_and_gradients_of_the_loop() -> None:
    model = LibraryModel(plain=True, adaptive=False)
    found, wanted = model(sentences()), alone(model)
    torch.testing.assert_close(found, wanted)
    (family,) = packed_of(model).families.values()
    assert family.variants and not family.reason
    grads = [torch.autograd.grad(r.sum(), list(model.parameters())) for r in (found, wanted)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_without_the_statement_it_is_recorded() -> None:
    model = LibraryModel(adaptive=False)
    torch.testing.assert_close(model(sentences()), alone(model))
    packed = packed_of(model)
    assert packed is None or packed.reason


def test_numbers_are_compared_all_the_same() -> None:
    model = LibraryModel(plain=True, adaptive=False)
    model(sentences())
    model.bias = 5.0
    torch.testing.assert_close(model(sentences()), alone(model))


def test_the_option_takes_a_truth_value() -> None:
    with pytest.raises(fxbatch.OptionError, match="plain='yes': takes True or False"):
        fxbatch.autobatch(plain="yes")  # type: ignore[call-overload]
