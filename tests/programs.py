"""Programs for tests: toy signatures, builders, named workloads and Hypothesis strategies.

build = ProgramBuilder(); x = build.constant(); y = build.call("f", x); build.program(y)
tree_lstm_program([(0, (1, 2))], instances...)
programs()            # a Hypothesis strategy
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from fxbatch.ir import Operation, Program, Signature, Slot, Template, TensorSpec, tensor_spec

F4 = tensor_spec((4,), torch.float32, torch.device("cpu"))
I64 = tensor_spec((), torch.int64, torch.device("cpu"))


def _sum_of(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.ones(4), *(t.float().expand(4) for t in tensors)]).sum(0).sin()


def _two(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.stack([torch.ones(4), *(t.float().expand(4) for t in tensors)]).sum(0)
    return total.sin(), total.cos()


class ProgramBuilder:
    """Records calls by hand: values are plain integers."""

    def __init__(self, instances: int = 1) -> None:
        self.signatures: list[Signature] = []
        self.index: dict[Any, int] = {}
        self.sig: list[int] = []
        self.inputs: list[int] = []
        self.instance: list[int] = []
        self.types: list[TensorSpec] = []
        self.constants: dict[int, list[Any]] = {}
        self.instances = instances
        self.known = 0

    def known_value(self, type_: TensorSpec = F4) -> int:
        """A value of an earlier phase; all of them before the first call."""
        assert not self.sig
        self.types.append(type_)
        self.known += 1
        return len(self.types) - 1

    def constant(self, payload: Any = 0, *, type_: TensorSpec | None = None, instance: int = 0) -> int:
        if isinstance(payload, torch.Tensor):
            type_, kind = TensorSpec.of(payload), "constant"
        elif type_ is not None:
            kind, payload = "constant", torch.zeros(type_.shape, dtype=type_.dtype)
        else:
            kind = "number"
            dtype = torch.float64 if isinstance(payload, float) else torch.int64
            type_ = tensor_spec((), dtype, torch.device("cpu"))
        key = (kind, type_)
        if key not in self.index:
            self._add(key, Signature(Operation(kind, kind), (), (type_,)))
        s = self.index[key]
        self.constants.setdefault(s, []).append(payload)
        return self._record(s, (), instance)[0]

    def call(
        self, name: str, *inputs: int, instance: int = 0, outputs: int = 1, random: bool = False, **extra: Any
    ) -> Any:
        types = tuple(self.types[i] for i in inputs)
        key = (name, types, outputs)
        if key not in self.index:
            target = _two if outputs == 2 else _sum_of
            slots = tuple(Slot("input", i) for i in range(len(inputs)))
            operation = Operation(name, "function", target, random=random)
            result = Template.of(tuple(Slot("output", i) for i in range(outputs)))
            self._add(
                key,
                Signature(operation, types, (F4,) * outputs, (), Template.of((slots, {})), result, **extra),
            )
        values = self._record(self.index[key], inputs, instance)
        return values[0] if outputs == 1 else values

    def use(self, signature: Signature, *inputs: int, instance: int = 0) -> Any:
        """A call of a ready-made signature."""
        if id(signature) not in self.index:
            self._add(id(signature), signature)
        values = self._record(self.index[id(signature)], inputs, instance)
        return values[0] if len(values) == 1 else values

    def _add(self, key: Any, signature: Signature) -> None:
        self.index[key] = len(self.signatures)
        self.signatures.append(signature)

    def _record(self, s: int, inputs: Any, instance: int) -> list[int]:
        self.sig.append(s)
        self.inputs.extend(inputs)
        self.instance.append(instance)
        first = len(self.types)
        self.types.extend(self.signatures[s].outputs)
        return list(range(first, len(self.types)))

    def program(self, *outputs: int) -> Program:
        made: list[TensorSpec] = list(dict.fromkeys(t for s in self.signatures for t in s.outputs))
        known_types = None
        if self.known:
            known_types = np.array([made.index(t) for t in self.types[: self.known]], dtype=np.int32)
        return Program(
            tuple(self.signatures),
            np.array(self.sig, dtype=np.int32),
            np.array(self.inputs, dtype=np.int64),
            np.array(self.instance, dtype=np.int32),
            np.array(outputs, dtype=np.int64),
            self.constants,
            self.known,
            known_types,
            self.instances,
        )


def random_tree(rng: random.Random, leaves: int) -> Any:
    """A binary tree of `leaves` words: an int or a pair."""
    if leaves == 1:
        return rng.randrange(1000)
    left = rng.randrange(1, leaves)
    return (random_tree(rng, left), random_tree(rng, leaves - left))


def tree_lstm_program(trees: list[Any]) -> Program:
    """embed -> leaf -> cell, and a classifier on each root, as the binary Tree-LSTM records it."""
    build = ProgramBuilder(len(trees))

    def encode(tree: Any, i: int) -> tuple[int, int]:
        if isinstance(tree, int):
            x = build.call("embed", build.constant(torch.tensor(tree), instance=i), instance=i)
            return build.call("leaf", x, instance=i, outputs=2)
        left, right = encode(tree[0], i), encode(tree[1], i)
        return build.call("cell", *left, *right, instance=i, outputs=2)

    outputs = [build.call("out", encode(tree, i)[0], instance=i) for i, tree in enumerate(trees)]
    return build.program(*outputs)


def bilstm_program(lengths: list[int], layers: int = 2) -> Program:
    """A BiLSTM tagger: two cells a layer and direction, a projection a word."""
    build = ProgramBuilder(len(lengths))
    outputs = []
    for i, n in enumerate(lengths):
        xs = [build.call("embed", build.constant(torch.tensor(k), instance=i), instance=i) for k in range(n)]
        zero = build.constant(torch.zeros(4), instance=i)
        for layer in range(layers):
            ahead, back = [0] * n, [0] * n
            h = c = zero
            for k in range(n):
                h, c = build.call(f"ahead{layer}", xs[k], h, c, instance=i, outputs=2)
                ahead[k] = h
            h = c = zero
            for k in reversed(range(n)):
                h, c = build.call(f"back{layer}", xs[k], h, c, instance=i, outputs=2)
                back[k] = h
            xs = [build.call("cat", a, b, instance=i) for a, b in zip(ahead, back, strict=True)]
        outputs += [build.call("tag", x, instance=i) for x in xs]
    return build.program(*outputs)


def chain_program(length: int, instances: int = 1) -> Program:
    """One RNN cell applied `length` times."""
    build = ProgramBuilder(instances)
    outputs = []
    for i in range(instances):
        h = build.constant(torch.zeros(4), instance=i)
        x = build.constant(torch.zeros(4), instance=i)
        for _ in range(length):
            h = build.call("cell", x, h, instance=i)
        outputs.append(h)
    return build.program(*outputs)


def lattice_program(rng: random.Random, lengths: list[int], words: float = 0.6) -> Program:
    """A lattice LSTM (Zhang & Yang 2018): character cells, and word cells that skip characters."""
    build = ProgramBuilder(len(lengths))
    outputs = []
    for i, n in enumerate(lengths):
        zero = build.constant(torch.zeros(4), instance=i)
        h, c = [zero], [zero]
        ending: list[list[int]] = [[] for _ in range(n + 1)]
        for k in range(n):
            for span in (2, 3, 4):
                if k + span <= n and rng.random() < words / span:
                    word = build.call("embed_word", build.constant(torch.tensor(k), instance=i), instance=i)
                    skip = build.call("word_cell", word, h[k], c[k], instance=i)
                    ending[k + span].append(skip)
            x = build.call("embed_char", build.constant(torch.tensor(k), instance=i), instance=i)
            new_h, new_c = build.call("char_cell", x, h[k], c[k], instance=i, outputs=2)
            for skip in ending[k + 1]:
                gate = build.call("gate", x, skip, instance=i)
                new_c = build.call("merge", new_c, gate, skip, instance=i)
            if ending[k + 1]:
                new_h = build.call("output", new_h, new_c, instance=i)
            h.append(new_h)
            c.append(new_c)
        outputs += [build.call("tag", x, instance=i) for x in h[1:]]
    return build.program(*outputs)


@st.composite
def programs(draw: Any, max_calls: int = 30, known: bool = True) -> Program:
    """Random programs: several signatures, multi-output calls, shared values, several instances."""
    instances = draw(st.integers(1, 3))
    build = ProgramBuilder(instances)
    values = []
    if known and draw(st.booleans()):
        values = [build.known_value() for _ in range(draw(st.integers(1, 3)))]
    values.append(build.constant(torch.zeros(4)))
    for _ in range(draw(st.integers(0, max_calls))):
        instance = draw(st.integers(0, instances - 1))
        kind = draw(st.sampled_from(["constant", "word", "f", "g", "h", "two", "draw", "none"]))
        arity = {"f": 1, "g": 2, "h": 3, "two": 2, "draw": 1, "none": 0}.get(kind, 0)
        ends = [values[-1 - draw(st.integers(0, len(values) - 1))] for _ in range(arity)]
        if kind == "constant":
            values.append(build.constant(torch.full((4,), float(draw(st.integers(0, 2)))), instance=instance))
        elif kind == "word":
            values.append(build.constant(torch.tensor(draw(st.integers(0, 2))), instance=instance))
        elif kind == "two":
            values.extend(build.call("two", *ends, instance=instance, outputs=2))
        else:
            values.append(build.call(kind, *ends, instance=instance, random=kind == "draw"))
    outputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=4, unique=True))
    return build.program(*outputs)
