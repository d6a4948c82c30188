"""`plain=True`: a forward whose source doesn't show that it is plain is packed, since its user says so."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxbatch
from fxbatch.runtime.build_queue import BuildQueue
from fxbatch.runtime.strategy import AdaptiveSwitch, Choice, Strategy
from fxbatch.trace.plain_body import Walk
from tests.ragged.test_packed_forward import packed_of, route_of

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
    assert route_of(model).forward is None
    assert route_of(model).code.reason


def test_it_is_said_that_it_may_be_stated() -> None:
    model = LibraryModel(adaptive=False)
    model(sentences()[:1])  # too few for a look at it
    (engine,) = model.__dict__["_fxbatch_engines"].values()
    instances = [((model, x), {}) for x in sentences()]
    _, why = engine.call_with_reasons(LibraryModel.forward, instances, "stack", None)
    said = "not packed as it reads LOCK, a lock, which can't be compared (test_stated_plain.py:"
    assert any(x.startswith(said) and "plain=True" in x for x in why()), why()
    stated = LibraryModel(plain=True, adaptive=False)
    stated(sentences())
    (engine,) = stated.__dict__["_fxbatch_engines"].values()
    assert not engine.packed.statement(LibraryModel.forward, instances)


def test_numbers_are_compared_all_the_same() -> None:
    model = LibraryModel(plain=True, adaptive=False)
    model(sentences())
    model.bias = 5.0
    torch.testing.assert_close(model(sentences()), alone(model))


def test_the_option_takes_a_truth_value() -> None:
    with pytest.raises(fxbatch.OptionError, match="plain='yes': takes True or False"):
        fxbatch.autobatch(plain="yes")  # type: ignore[call-overload]


def test_it_is_tried_however_short_the_loop_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a function for all sizes is not where the loop takes less than a tenth of what it takes."""
    monkeypatch.setattr(AdaptiveSwitch, "on", True)
    monkeypatch.setattr(Strategy, "choose", lambda *_, **__: Choice(True))
    monkeypatch.setattr(BuildQueue, "may_try", lambda *_: False)
    model = LibraryModel(plain=True)
    torch.testing.assert_close(model(sentences()), alone(model))
    (family,) = packed_of(model).families.values()
    assert family.variants


@pytest.mark.parametrize("plain", [False, True])
def test_code_that_calls_deeply_is_no_error(plain: bool, tmp_path: Path) -> None:
    (tmp_path / "deep.py").write_text(
        "\n".join(f"def f{i}(x): return f{i + 1}(x) + 1.0" for i in range(150)) + "\ndef f150(x): return x\n"
    )
    spec = importlib.util.spec_from_file_location("deep", tmp_path / "deep.py")
    assert spec is not None and spec.loader is not None
    deep = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(deep)

    class Deep(nn.Module):
        @fxbatch.autobatch(plain=plain, adaptive=False)
        def forward(self, x: Tensor) -> Tensor:
            return deep.f0(x).mean(0)

    torch.testing.assert_close(Deep()(sentences()), torch.stack([x.mean(0) + 150 for x in sentences()]))


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize("plain", [False, True])
def test_a_method_of_another_class_is_no_error(plain: bool) -> None:
    """A branch that never runs gives a layer to a method that calls super()."""

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.number = nn.Linear(4, 4), 1

        @fxbatch.autobatch(plain=plain, adaptive=False)
        def forward(self, x: Tensor) -> Tensor:
            y = Doubled.forward(self.layer, x) if self.number > 3 else self.layer(x)  # type: ignore[arg-type]
            return y.mean(0)

    model = Chosen()
    torch.testing.assert_close(model(sentences()), torch.stack([model.layer(x).mean(0) for x in sentences()]))


def negated(x: Tensor) -> Tensor:
    return -x


def apply(f: Any, x: Tensor) -> Tensor:
    return f(x)


def test_each_function_is_looked_into_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With whatever it is given: a library's masks are functions of functions, which took 20 s."""
    walked: list[str] = []
    statements = Walk._statements

    def noted(walk: Walk, body: Any, scope: Any) -> None:
        walked.append(getattr(scope.node, "name", ""))
        statements(walk, body, scope)

    monkeypatch.setattr(Walk, "_statements", noted)

    class Applied(nn.Module):
        @fxbatch.autobatch(plain=True, adaptive=False)
        def forward(self, x: Tensor) -> Tensor:
            x = apply(negated, apply(torch.tanh, apply(torch.relu, x)))
            return apply(torch.sigmoid, x).mean(0)

    wanted = torch.stack([torch.sigmoid(-torch.tanh(torch.relu(x))).mean(0) for x in sentences()])
    torch.testing.assert_close(Applied()(sentences()), wanted)
    assert walked.count("apply") <= 2, walked  # the body, until nothing more is found


class Indexed(torch.autograd.Function):
    """As torch's own for masks: derivatives for what never has any."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, at: Tensor) -> Tensor:
        return x[at]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None


def test_functions_with_derivatives_are_packed_where_integers_are_all_they_take() -> None:
    class Ordered(nn.Module):
        @fxbatch.autobatch(plain=True, adaptive=False)
        def forward(self, x: Tensor) -> Tensor:
            last = Indexed.apply(torch.arange(len(x)).flip(0), torch.arange(len(x)))
            return (x[last] * last[:, None]).sum(0)

    model = Ordered()
    wanted = torch.stack([(x.flip(0) * torch.arange(len(x)).flip(0)[:, None]).sum(0) for x in sentences()])
    torch.testing.assert_close(model(sentences()), wanted)
    (family,) = packed_of(model).families.values()
    assert family.variants and not family.reason
