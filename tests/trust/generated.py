"""Generated per-instance programs: DAGs of torch functions, modules, recursion, value branches, sharing.

In: Hypothesis. Out: a Case: a plan that a model's forward interprets, and a minibatch of instances. Every
value is a vector of `SIZE` or `2 * SIZE` features, so that any function fits anywhere.

    case = cases().example(); check(case, schedule="depth")
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import fxbatch
from tests.oracle import check_equal
from tests.trust.programs import model

SIZE = 4

UNARY = {
    "tanh": torch.tanh,
    "sin": lambda x: x.sin(),
    "softmax": lambda x: torch.softmax(x, -1),
    "normed": lambda x: F.layer_norm(x, x.shape[-1:]),
    "flip": lambda x: x.flip(-1),
    "halves": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "max": lambda x: x + x.max(-1).values.unsqueeze(-1),
    "pieces": lambda x: torch.stack(list(x)[::-1]),
    "view": lambda x: x.view(2, -1).t().reshape(-1),
    "detached": lambda x: x.detach() * 0.5 + x,
    "written": lambda x: x.clone().mul_(0.5).add_(0.25),
    "row written": lambda x: _with_row(x),
    "double": lambda x: x.double().cos().to(x.dtype),
}
BINARY = {
    "add": lambda a, b: a + b,
    "gate": lambda a, b: torch.sigmoid(a) * b,
    "where": lambda a, b: torch.where(a > 0.0137, a, b),
    "min": torch.minimum,
    "dot": lambda a, b: (a @ b) * a * 0.1,
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "outer": lambda a, b: torch.outer(a, b).mean(0),
    "stacked": lambda a, b: torch.stack([a, b]).sum(0),
}
MODULES = ("linear", "other", "deep", "cell", "marked")


def _with_row(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0] = x.sum() * 0.1
    y[1:3] *= 2
    return y


class Marked(nn.Module):
    """A user's module of several functions, with two results."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * SIZE, 2 * SIZE)

    def forward(self, a: Any, b: Any) -> Any:
        i, o = self.inner(torch.cat([a, b], -1)).chunk(2, -1)
        return torch.tanh(i), torch.sigmoid(o)


def parts() -> dict[str, Any]:
    """The modules that programs use, with the same weights each time."""
    torch.manual_seed(1)
    return {
        "linear": nn.Linear(SIZE, SIZE),
        "other": nn.Linear(SIZE, SIZE, bias=False),
        "deep": nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE)),
        "cell": nn.GRUCell(SIZE, SIZE),
        "marked": Marked(),
        "scale": nn.Parameter(torch.randn(SIZE)),
        "table": nn.Embedding(5, SIZE),
    }


@dataclass
class Step:
    """One statement of a program: what, on which earlier values, with which number."""

    what: str
    name: str = ""
    a: int = 0
    b: int = 0
    number: float = 1.0
    body: list[Step] = field(default_factory=list)


@dataclass
class Instance:
    """One instance: the program to run, its tensors, a tree, and what it gives back."""

    program: list[Step]
    tensors: list[torch.Tensor]
    tree: Any
    words: list[int]
    results: list[int]


def interpret(self: Any, instance: Instance) -> Any:
    """The per-instance forward."""
    values = [self.table(torch.tensor(w)) for w in instance.words] + list(instance.tensors)
    _run(self, instance.program, values, instance)
    return [values[r % len(values)] for r in instance.results]


def _run(self: Any, program: list[Step], values: list[Any], instance: Instance) -> None:
    for s in program:
        a, b = values[s.a % len(values)], values[s.b % len(values)]
        if s.what == "unary":
            values.append(UNARY[s.name](a))
        elif s.what == "binary":
            values.append(BINARY[s.name](a, b))
        elif s.what == "number":
            values.append((a + s.number) * self.scale)
        elif s.what == "module":
            values.append(_module(self, s.name, a, b))
        elif s.what == "two":
            values.extend(self.marked(a, b))
        elif s.what == "branch":
            total = a.sum().item()
            _decided(total - (s.number - 1))
            if total > s.number - 1:
                _run(self, s.body, values, instance)
            else:
                values.append(a * 0.5)
        elif s.what == "loop":
            scaled = abs(b[0].item()) * 10
            _decided(scaled - max(round(scaled), 0.5))
            for _ in range(int(scaled) % 3):
                _run(self, s.body, values, instance)
        elif s.what == "index":
            scores = torch.softmax(b, -1)
            if _margins is not None:
                _decided(scores.topk(2).values.diff().item())
            values.append(torch.roll(a, int(scores.argmax())))
        elif s.what == "tree":
            values.append(_fold(self, instance.tree, values))


_margins: list[float] | None = None  # how clear each decision on a value was, while somebody asks


def _decided(margin: float) -> None:
    if _margins is not None:
        _margins.append(abs(margin))


def is_clear(case: Case, margin: float = 1e-3) -> bool:
    """Whether no branch hangs on rounding errors (the sum of a normalised vector is zero or nearly so)."""
    global _margins
    _margins = []
    try:
        with fxbatch.disabled(), torch.no_grad():
            model_of(tuple(sorted(case.options.items())))(case.instances)
        return min(_margins, default=1.0) > margin
    finally:
        _margins = None


def _module(self: Any, name: str, a: Any, b: Any) -> Any:
    if name == "cell":
        return self.cell(a[None], b[None])[0]
    return self.marked(a, b)[1] if name == "marked" else getattr(self, name)(a)


def _fold(self: Any, tree: Any, values: list[Any]) -> Any:
    if isinstance(tree, int):
        return values[tree % len(values)]
    return torch.tanh(self.linear(_fold(self, tree[0], values)) + self.other(_fold(self, tree[1], values)))


NUMBERS = st.sampled_from([0.5, 1.0, 1.1, 1.2, 2, -1.5])
POSITIONS = st.integers(0, 40)


def steps(depth: int) -> Any:
    """One statement; branches and loops hold others."""
    plain = [
        st.builds(Step, st.just("unary"), st.sampled_from(sorted(UNARY)), POSITIONS),
        st.builds(Step, st.just("binary"), st.sampled_from(sorted(BINARY)), POSITIONS, POSITIONS),
        st.builds(Step, st.just("module"), st.sampled_from(MODULES), POSITIONS, POSITIONS),
        st.builds(Step, st.just("number"), st.just(""), POSITIONS, POSITIONS, NUMBERS),
        st.builds(Step, st.just("two"), st.just(""), POSITIONS, POSITIONS),
        st.builds(Step, st.just("index"), st.just(""), POSITIONS, POSITIONS),
        st.builds(Step, st.just("tree")),
    ]
    if depth:
        body = st.lists(steps(depth - 1), min_size=1, max_size=3)
        plain += [
            st.builds(Step, st.just("branch"), st.just(""), POSITIONS, POSITIONS, NUMBERS, body),
            st.builds(Step, st.just("loop"), st.just(""), POSITIONS, POSITIONS, NUMBERS, body),
        ]
    return st.one_of(plain)


TREES = st.recursive(st.integers(0, 9), lambda t: st.tuples(t, t), max_leaves=6)


@dataclass
class Case:
    """A minibatch and how to run it."""

    instances: list[Instance]
    options: dict[str, Any]

    def __repr__(self) -> str:
        return f"Case(options={self.options}, instances={self.instances})"


WAYS = (
    {}, {"schedule": "depth"}, {"schedule": "fold"}, {"schedule": "lookahead"},
    {"schedule": "none"}, {"backward": "autograd"}, {"mode": "unrolled"}, {"deduplicate": True},
    {"fuse": False},
    {"schedule": "depth", "backward": "autograd", "deduplicate": True},
    {"schedule": "lookahead", "fuse": False},
)  # fmt: skip


@st.composite
def cases(draw: Any, max_instances: int = 4, max_steps: int = 8) -> Case:
    """Minibatches: instances run the same program, or one of two; tensors may be shared by instances."""
    programs = draw(st.lists(st.lists(steps(2), min_size=1, max_size=max_steps), min_size=1, max_size=2))
    rng = random.Random(draw(st.integers(0, 10_000)))
    shared = _vector(rng)
    instances = []
    for _ in range(draw(st.integers(1, max_instances))):
        tensors = [_vector(rng) for _ in range(draw(st.integers(1, 3)))]
        if draw(st.booleans()):
            tensors.append(shared)
        instances.append(
            Instance(
                draw(st.sampled_from(programs)),
                tensors,
                draw(TREES),
                draw(st.lists(st.integers(0, 4), max_size=3)),
                draw(st.lists(POSITIONS.map(lambda r: -1 - r), min_size=1, max_size=3)),
            )
        )
    return Case(instances, dict(draw(st.sampled_from(WAYS))))


def _vector(rng: random.Random) -> torch.Tensor:
    made = torch.tensor([rng.uniform(-2, 2) for _ in range(SIZE)])
    return made.requires_grad_(rng.random() < 0.5)


@functools.cache
def model_of(options: tuple[tuple[str, Any], ...]) -> nn.Module:
    """One model a way, so that what was compiled for one example serves the next."""
    return model(interpret, parts(), out="list", **dict(options))


def check(case: Case) -> None:
    """The oracle: values and gradients of the batched call equal the loop's."""
    assume(is_clear(case))
    check_equal(model_of(tuple(sorted(case.options.items()))), case.instances)
