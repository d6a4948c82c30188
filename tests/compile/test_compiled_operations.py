"""`compile=`: values and gradients as uncompiled, one compilation a graph, fallbacks that say why."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.codegen import inductor as compiling
from fxbatch.codegen.inductor import CompileOptions
from fxbatch.codegen.native import extension
from fxbatch.errors import CompileWarning, OptionError
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.trace.torch_patches import patched
from tests.models import Tree, random_tree
from tests.oracle import assert_same

ROOT = Path(__file__).resolve().parents[2]


def operations_of(model: nn.Module) -> list[CompiledOperation]:
    """The operations that a decorated module has run."""
    engines = list(model.__dict__["_fxbatch_engines"].values())
    return [x for engine in engines for x in engine.operations._entries.values() if x.signature.inputs]


def trees_of(count: int, seed: int = 0) -> list[Tree]:
    rng = random.Random(seed)
    return [random_tree(rng, rng.randrange(1, 9)) for _ in range(count)]


def compare(model: nn.Module, trees: list[Tree]) -> None:
    """Values and gradients of a decorated model against the undecorated forward in float64."""
    model.zero_grad()
    results = model(trees)
    results.square().sum().backward()
    got = [p.grad for p in model.parameters()]
    with fxbatch.disabled():
        wanted = model(trees)
        grads = torch.autograd.grad(wanted.square().sum(), list(model.parameters()))
    assert_same([results, *got], [wanted, *grads])


class Pair(nn.Module):
    """One operation: Inductor's compiler is what costs here."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(torch.cat([left, right])))


class PlainPairs(nn.Module):
    """A tree of pairs, each leaf full of its word."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()

    def encode(self, tree: Tree) -> Any:
        if tree.word is not None:
            return torch.full((4,), float(tree.word))
        left, right = tree.children
        return self.pair(self.encode(left), self.encode(right))


def decorated(**options: Any) -> PlainPairs:
    """The model decorated with options."""

    class Pairs(PlainPairs):
        @fxbatch.autobatch(**options)
        def forward(self, tree: Tree) -> torch.Tensor:
            return self.pair(self.encode(tree), self.encode(tree))

    return Pairs()


def test_compiled_equals_one_by_one_and_compiles_once() -> None:
    model = decorated(compile=True)
    for count in (5, 1, 12):
        compare(model, trees_of(count, seed=count))
    before = [x.seconds for o in operations_of(model) for x in o.compiled]
    for count in (2, 3, 30):
        compare(model, trees_of(count, seed=count))
    after = [x.seconds for o in operations_of(model) for x in o.compiled]
    assert before == after, "another number of rows compiles nothing again"
    assert all(not operation.uncompiled for operation in operations_of(model))
    assert {len(operation.compiled) for operation in operations_of(model)} == {3}


def warned(work: Callable[[], Any]) -> list[str]:
    """The messages of the CompileWarnings that work gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CompileWarning)
        work()
    return [str(w.message) for w in caught if w.category is CompileWarning]


def test_more_operations_than_dynamo_compiles_of_one_function_while_another_thread_records() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(10))

        @fxbatch.autobatch(compile="eager")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model, x = Layers(), torch.randn(3, 4)
    with torch.no_grad(), patched():  # as another thread's recording would have it
        assert warned(lambda: model(x)) == []
        assert {len(operation.compiled) for operation in operations_of(model)} == {1}
        found = model(x)
    with fxbatch.disabled():
        torch.testing.assert_close(found, model(x))


def test_no_gradient_compiles_forward_only() -> None:
    model = decorated(compile="eager")
    with torch.no_grad():
        found = model(trees_of(4))
        with fxbatch.disabled():
            torch.testing.assert_close(found, model(trees_of(4)))
    assert {len(operation.compiled) for operation in operations_of(model)} == {1}


def test_a_backend_of_the_users_own_gets_the_options() -> None:
    seen = []

    def backend(graph: torch.fx.GraphModule, examples: list[Any], *, flavour: str) -> Any:
        seen.append(flavour)
        return graph.forward

    compare(decorated(compile=backend, compile_options={"options": {"flavour": "plain"}}), trees_of(3))
    assert set(seen) == {"plain"} and len(seen) >= 3, "forward, backward and parameters"


def test_a_failing_backend_warns_with_the_reason_and_falls_back() -> None:
    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        raise RuntimeError("this machine has no such thing")

    model = decorated(compile=backend)
    assert any(
        "pair: forward runs uncompiled" in text for text in warned(lambda: compare(model, trees_of(3)))
    )
    found: list[fxbatch.Explanation] = []
    texts = warned(lambda: found.append(fxbatch.explain(model, trees_of(3), compile=backend)))
    assert texts and all("this machine has no such thing" in text for text in texts)
    assert any("not forward" in row.compiled for row in found[0].operations)


def test_a_backend_that_computes_something_else_is_not_used() -> None:
    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        def wrong(*args: Any) -> tuple[()]:
            for x in args:
                if isinstance(x, torch.Tensor) and x.dim() == 2:
                    x.fill_(3)
            return ()

        return wrong

    texts = warned(lambda: compare(decorated(compile=backend), trees_of(3)))
    assert any("differs from the uncompiled graph" in text for text in texts), texts


@pytest.mark.skipif(extension is None, reason="the extension was not built")
def test_auto_compiles_what_has_no_native_program() -> None:
    linear = nn.Linear(3, 3)

    @fxbatch.autobatch(compile="auto")
    def square(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(linear(x)) * x

    xs = torch.randn(5, 3)
    found = fxbatch.explain(square, list(xs))
    assert all(row.compiled == "" and row.compile_seconds == 0 for row in found.operations), (
        "float32 runs native"
    )
    linear.double()
    with torch.no_grad():
        found = fxbatch.explain(square, list(xs.double()))
        assert any("forward" in row.compiled for row in found.operations), "float64 has no native program"
        torch.testing.assert_close(square(list(xs.double())), torch.tanh(linear(xs.double())) * xs.double())


def test_explain_shows_what_was_compiled() -> None:
    found = fxbatch.explain(decorated(compile="eager"), trees_of(3))
    text = str(found)
    assert "compiled in" in text and "forward, backward, parameters" in text
    assert all(row.compile_seconds > 0 for row in found.operations)
    assert "compile_seconds" in found.to_dict()["operations"][0]


def test_where_compiled_code_does_not_fit_the_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    original = compiling.compile_symbolic

    def narrow(function: Any, tensors: Any, dynamic: Any, rows: int, patches: Any) -> Any:
        run, _ = original(function, tensors, dynamic, rows, patches)
        return run, lambda count: count == rows

    monkeypatch.setattr(compiling, "compile_symbolic", narrow)
    monkeypatch.setattr(compiling, "_ROWS", (61,))
    model = nn.Linear(3, 3)

    @fxbatch.autobatch(compile=True)
    def square(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(model(x)) * x

    x = torch.randn(7, 3)
    with torch.no_grad():
        square(torch.randn(61, 3))
        with pytest.warns(CompileWarning, match="not for 7 rows"):
            torch.testing.assert_close(square(x), torch.tanh(model(x)) * x)


def test_unknown_backends_are_refused_with_those_that_are_known() -> None:
    with pytest.raises(OptionError, match=r"'indcutor'.*'inductor'"):
        fxbatch.autobatch(compile="indcutor")


def test_what_autograd_differentiates_is_not_compiled_and_says_so() -> None:
    model = decorated(compile="eager", backward="autograd")
    texts = warned(lambda: compare(model, trees_of(3)))
    assert len(texts) == 1 and 'backward="autograd" runs uncompiled' in texts[0]
    found: list[fxbatch.Explanation] = []
    warned(lambda: found.append(fxbatch.explain(model, trees_of(2))))
    assert all(row.compile_seconds == 0 and row.compiled == "" for row in found[0].operations)
    assert all(not operation.compiled for operation in operations_of(model))
    with torch.no_grad():
        model(trees_of(3))
    assert any(operation.compiled for operation in operations_of(model)), "without gradients it is used"


def test_options_reach_inductor() -> None:
    given = (("mode", "max-autotune-no-cudagraphs"), ("options", (("epilogue_fusion", False),)), ("x.y", 3))
    patches = CompileOptions("inductor", given).patches()
    assert patches["max_autotune"] is True and patches["epilogue_fusion"] is False and patches["x.y"] == 3


def test_a_wrong_inductor_option_is_a_warning_that_names_it() -> None:
    model = decorated(compile=True, compile_options={"no_such_option": 1})
    texts = warned(lambda: compare(model, trees_of(2)))
    assert texts and all("no_such_option" in text for text in texts)


SCRIPT = """
import torch, fxbatch
from torch._dynamo.utils import counters
linear = torch.nn.Linear(3, 3)

@fxbatch.autobatch(compile=True)
def forward(x):
    return torch.tanh(linear(x))

forward(torch.randn(4, 3)).sum().backward()
print(counters['inductor']['fxgraph_cache_hit'], counters['inductor']['fxgraph_cache_miss'])
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing_anew(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # longer than what is compiled
        "PYTHONPATH": str(ROOT),
    }
    counts = []
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        assert ran.returncode == 0, ran.stderr
        counts.append(tuple(map(int, ran.stdout.split()[-2:])))
    (_, cold), (hits, warm) = counts
    assert cold >= 3 and warm == 0 and hits >= cold, counts
