"""A decorated module inside the user's torch.compile; the unrolled module compiled and exported."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from tests.models import Tree, TreeLSTM, random_tree

ROOT = Path(__file__).resolve().parents[2]
# Dynamo looks at `.grad` of every tensor that comes out of a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Outer(nn.Module):
    """What a user compiles: a decorated module with other layers behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.trees = TreeLSTM()
        self.out = nn.Linear(3, 2)

    def forward(self, trees: list[Tree]) -> torch.Tensor:
        return self.out(torch.relu(self.trees(trees)) * 2)


def trees_of(count: int, seed: int) -> list[Tree]:
    rng = random.Random(seed)
    return [random_tree(rng, rng.randrange(1, 9)) for _ in range(count)]


def test_a_decorated_module_breaks_the_graph_and_nothing_is_compiled_a_minibatch() -> None:
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model = Outer()
    compiled = torch.compile(model, backend=backend)
    for seed in range(6):  # same number of trees, each minibatch of other shapes
        trees = trees_of(5, seed)
        model.zero_grad()
        found = compiled(trees)
        found.sum().backward()
        got = [p.grad for p in model.parameters()]
        wanted = model(trees)
        grads = torch.autograd.grad(wanted.sum(), list(model.parameters()))
        torch.testing.assert_close(found, wanted)
        for ours, theirs in zip(got, grads, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert len(graphs) == 1, f"minibatch {seed} was compiled again"
    for count in (2, 7, 9):
        torch.testing.assert_close(compiled(trees_of(count, count)), model(trees_of(count, count)))
    assert len(graphs) == 2, "one graph for any number of instances"


def test_a_decorated_function_in_a_compiled_one() -> None:
    linear = nn.Linear(3, 3)

    @fxbatch.autobatch
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(linear(x))

    torch.compiler.reset()
    compiled = torch.compile(lambda x: forward(x * 2) + 1, backend="eager")
    x = torch.randn(4, 3)
    torch.testing.assert_close(compiled(x), torch.tanh(linear(x * 2)) + 1)


# One process imports torch; each script runs in a fork of it, which has imported no torch._dynamo.
FORKS = """
import os, sys, traceback
import torch, fxbatch

print("torch._dynamo" in sys.modules, flush=True)
for script in sys.argv[1:]:
    if not os.fork():
        try:
            exec(compile(script, "script", "exec"), {})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""

MEETS = """
import sys, torch, fxbatch
linear = torch.nn.Linear(3, 3)

@fxbatch.autobatch(adaptive=False)
def forward(x):
    h = torch.tanh(linear(x))
    %s
    return torch.relu(linear(h)) + torch.zeros(3)

x = torch.randn(4, 3)
found = forward(x)
assert type(sys.modules["torch._dynamo"]) is type(sys)
torch.testing.assert_close(found, torch.relu(linear(torch.tanh(linear(x)))))

@torch.compile(fullgraph=True, backend="eager")
def make(x):
    return x + torch.zeros(3) + torch.nn.functional.relu(x)

make(torch.randn(3))
print("fine")
"""

# Met while a minibatch is recorded.
LINES = [
    "import importlib; importlib.import_module('torch._dynamo.utils')",
    "from torch._dynamo import optimize",
    "torch.compiler.disable(torch.sin)(h)",
    "h = torch.compile(torch.sigmoid, backend='eager')(h) * 0 + h",
    "torch.optim.SGD(linear.parameters()).zero_grad(); torch._dynamo.reset()",
]

# Dynamo lists torch's functions once: were that while some are patched, it would know none of these.
MAKERS = """
import torch, fxbatch
linear = torch.nn.Linear(3, 3)

@fxbatch.autobatch
def forward(x):
    return torch.tanh(linear(x))

forward(torch.randn(2, 3))

@torch.compile(fullgraph=True, backend="eager")
def make(x):
    names = ("zeros", "ones", "empty", "rand", "randn")
    made = [getattr(torch, name)(3) for name in names] + [torch.full((3,), 2.0), torch.arange(3), torch.eye(3)]
    return [x + y for y in made], torch.as_tensor(x), torch.linspace(0, 1, 3)

print(len(make(torch.randn(3))[0]))
"""

CALLS = "import sys; from tests.models import TreeLSTM; print('torch._dynamo' in sys.modules)"


@pytest.mark.parametrize("lines", [LINES[::2], pytest.param(LINES, marks=pytest.mark.slow)], ids=len)
def test_dynamo_is_imported_at_any_time(lines: list[str]) -> None:
    """Not by decorating; while a minibatch is recorded; after a first recording."""
    scripts = [CALLS, *(MEETS % line for line in lines), MAKERS]
    ran = subprocess.run(
        [sys.executable, "-c", FORKS, *scripts], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ran.stdout.split() == ["False", "False", *["fine"] * len(lines), "8"], ran.stderr[-2000:]


def unrolled_of(count: int) -> tuple[fxbatch.Minibatch, list[torch.Tensor]]:
    minibatch = fxbatch.compile_minibatch(TreeLSTM(), trees_of(count, count))
    unrolled = minibatch.unrolled
    return minibatch, unrolled.arguments([], minibatch.rewritten.constants)


def test_an_unrolled_minibatch_compiles_as_one_graph() -> None:
    minibatch, arguments = unrolled_of(3)
    torch.compiler.reset()
    compiled = torch.compile(minibatch.graph_module, fullgraph=True, backend="aot_eager")
    wanted = minibatch.graph_module(*arguments)
    for ours, theirs in zip(compiled(*arguments), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    model = minibatch.engine.root
    assert model is not None
    leaves = list(model.parameters())
    grads = [
        torch.autograd.grad(sum(x.sum() for x in run(*arguments)), leaves, allow_unused=True)
        for run in (compiled, minibatch.graph_module)
    ]
    assert any(g is not None for g in grads[1])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_an_unrolled_minibatch_exports() -> None:
    minibatch, arguments = unrolled_of(3)
    with torch.no_grad():
        exported = torch.export.export(minibatch.graph_module, tuple(arguments))
        wanted = minibatch.graph_module(*arguments)
        for ours, theirs in zip(exported.module()(*arguments), wanted, strict=True):
            torch.testing.assert_close(ours, theirs)
