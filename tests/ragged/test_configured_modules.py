"""Modules of the `transformers` library: their code is not looked into, what they and their configuration hold is
compared. A small package of that name stands for it here."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxbatch
from fxbatch.trace.reads import Reads
from tests.ragged.test_packed_forward import packed_of

LIBRARY = """
    import logging, threading
    import torch
    from torch import nn

    REGISTRY, LOCK, COUNTS = {"tanh": torch.tanh}, threading.Lock(), {"calls": 0}

    class Configuration:
        def __init__(self):
            self.scale, self.rope = 2.0, {"theta": 1.0}

        def __getattribute__(self, name):
            return object.__getattribute__(self, name)

    class Output(dict):
        def __getattr__(self, name):
            return self[name]

    torch.utils._pytree.register_pytree_node(
        Output, lambda x: (list(x.values()), list(x)), lambda values, names: Output(zip(names, values))
    )

    class Layer(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config, self.linear = config, nn.Linear(4, 4)

        def forward(self, hidden, *, scale=None, cache=None):
            with LOCK:
                COUNTS["calls"] += 1
            if cache is not None:
                cache.append(hidden)
            hidden = REGISTRY["tanh"](self.linear(hidden)) * (scale or self.config.scale)
            return hidden + self.config.rope["theta"]

    class Model(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.config, self.embedding, self.layers = config, nn.Embedding(20, 4), nn.ModuleList([Layer(config)])

        def forward(self, words):
            hidden = self.embedding(words)
            for layer in self.layers:
                hidden = layer(hidden)
            return Output(hidden=hidden)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of a package named transformers, whose code is as that library's is."""
    package, modeling = ModuleType("transformers"), ModuleType("transformers.modeling")
    for module, source in ((package, "__version__ = '5.0'"), (modeling, textwrap.dedent(LIBRARY))):
        file = tmp_path / f"{module.__name__}.py"
        file.write_text(source)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(source, str(file), "exec"), vars(module))
    return modeling


def sentences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(20, (n,), generator=generator) for n in (3, 5, 2, 5)]


class Encoder(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, words: Tensor) -> Tensor:
        hidden: Tensor = self.net(words=words[None]).hidden
        return hidden[0].mean(0)


class Batched(Encoder):
    forward = fxbatch.autobatch(adaptive=False)(Encoder.forward)


class Tree(Encoder):
    """A recursion over what it gives."""

    def join(self, rows: list[Tensor]) -> Tensor:
        middle = len(rows) // 2
        return rows[0] if not middle else torch.tanh(self.join(rows[:middle]) + self.join(rows[middle:]))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.net(words=words[None]).hidden[0]
        return self.join([hidden[i] for i in range(len(words))])


def equal_to_the_loop(model: Encoder, forward: Any) -> None:
    found = torch.stack(list(model(sentences())))
    wanted = torch.stack([forward(model, x) for x in sentences()])
    torch.testing.assert_close(found, wanted)
    grads = [torch.autograd.grad(r.square().sum(), list(model.parameters())) for r in (found, wanted)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_a_forward_that_calls_one_is_packed(library: Any) -> None:
    model = Batched(library.Model(library.Configuration()))
    equal_to_the_loop(model, Encoder.forward)
    (family,) = packed_of(model).families.values()
    assert family.variants and not family.reason


def test_its_code_runs_no_more_than_once_a_size(library: Any) -> None:
    model = Batched(library.Model(library.Configuration()))
    model(sentences())
    calls = library.COUNTS["calls"]
    model(sentences())
    assert library.COUNTS["calls"] == calls


@pytest.mark.parametrize("change", ["number", "nested", "of a part"])
def test_a_change_of_its_configuration_is_seen(library: Any, change: str) -> None:
    configuration = library.Configuration()
    model = Batched(library.Model(configuration))
    equal_to_the_loop(model, Encoder.forward)
    if change == "number":
        configuration.scale = 3.0
    elif change == "nested":
        configuration.rope["theta"] = 5.0
    else:
        model.net.layers[0].config = library.Configuration()  # type: ignore[index, union-attr]
        model.net.layers[0].config.scale = 7.0  # type: ignore[index, union-attr]
    equal_to_the_loop(model, Encoder.forward)


def test_what_calls_one_in_a_recursion_has_it_as_one_operation(library: Any) -> None:
    tree = type("BatchedTree", (Tree,), {"forward": fxbatch.autobatch(adaptive=False)(Tree.forward)})
    model = tree(library.Model(library.Configuration()))
    for _ in range(3):
        equal_to_the_loop(model, Tree.forward)
    assert not Reads.of_module(model.net).opaque
    names = [row.operation for row in fxbatch.explain(model, sentences()).operations]
    assert "net" in names
    assert not any(name.startswith("net.") for name in names)


def test_a_cache_that_it_writes_to_is_no_argument_of_an_operation(library: Any) -> None:
    class Cached(Encoder):
        def forward(self, words: Tensor) -> Tensor:
            cache: list[Tensor] = []
            hidden = self.net(self.net.embedding(words), cache=cache)  # type: ignore[operator]
            return (hidden + cache[0]).mean(0)

    layer = library.Layer(library.Configuration())
    layer.embedding = nn.Embedding(20, 4)
    batched = type("Batched", (Cached,), {"forward": fxbatch.autobatch(adaptive=False)(Cached.forward)})
    equal_to_the_loop(batched(layer), Cached.forward)


def test_a_users_subclass_is_looked_into(library: Any) -> None:
    class Mine(library.Layer):  # type: ignore[misc, name-defined]
        def forward(self, hidden: Tensor) -> Tensor:
            print("called", end="")
            return super().forward(hidden)  # type: ignore[no-any-return]

    assert "print()" in Reads.of_module(Mine(library.Configuration())).opaque


def test_the_version_is_among_what_a_kept_trace_depends_on(library: Any) -> None:
    lines = Reads.of_module(library.Model(library.Configuration())).lines()
    assert "transformers.__version__: '5.0'" in lines


def test_another_librarys_module_is_looked_into(library: Any) -> None:
    library.Layer.__module__ = "another.modeling"
    assert Reads.of_module(library.Layer(library.Configuration())).opaque
