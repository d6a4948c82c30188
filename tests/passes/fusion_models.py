"""Cells written as bare torch functions, as programs: a Tree-LSTM and an LSTM tagger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from fxbatch.ir import Operation, Program, SharedOperand, Signature, Slot, Template, TensorSpec
from tests.programs import ProgramBuilder

HIDDEN = 5


class Functions:
    """Signatures of bare functions, made once, by name and argument types."""

    def __init__(self) -> None:
        self.made: dict[Any, Signature] = {}
        draw = torch.Generator().manual_seed(0)
        sizes = {"E": (50, 5), "V": (20, 5), "W": (20, 10), "R": (20, 5), "O": (3, 5)}
        self.weights = {k: torch.randn(size, generator=draw).requires_grad_() for k, size in sizes.items()}

    def call(
        self,
        build: ProgramBuilder,
        i: int,
        name: str,
        target: Callable[..., Any],
        *values: int,
        weight: str = "",
        **static: Any,
    ) -> Any:
        types = tuple(build.types[v] for v in values)
        key = (name, types, weight)
        if key not in self.made:
            shared = (SharedOperand(None, weight, self.weights[weight]),) if weight else ()
            slots = [
                *(Slot("input", k) for k in range(len(types))),
                *(Slot("shared", k) for k in range(len(shared))),
            ]
            draft = Signature(
                Operation(name, "function", target), types, (), shared, Template.of((tuple(slots), static))
            )
            example = [torch.zeros(t.shape, dtype=t.dtype) for t in types]
            outputs = tuple(TensorSpec.of(t) for t in draft.run(example, [o.resolve() for o in shared]))
            self.made[key] = Signature(draft.operation, types, outputs, shared, draft.arguments)
        return build.use(self.made[key], *values, instance=i)

    def gates(self, u: Callable[..., Any], z: int) -> tuple[int, int, int, int]:
        i, f, o, g = u("chunk", torch.chunk, z, chunks=4)
        return u("sigmoid", torch.sigmoid, i), f, o, u("tanh", torch.tanh, g)

    def tree_lstm(self, trees: list[Any], classify_all: bool, readout: str = "out") -> Program:
        build, outputs = ProgramBuilder(len(trees)), []

        def encode(tree: Any, instance: int) -> tuple[int, int]:
            def u(*args: Any, **kw: Any) -> Any:
                return self.call(build, instance, *args, **kw)

            if isinstance(tree, int):
                word = build.constant(torch.tensor(tree % 50), instance=instance)
                x = u("embed", lambda i, w: w[i], word, weight="E")
                i, _, o, g = self.gates(u, u("linear_x", F.linear, x, weight="V"))
                c = u("mul", torch.mul, i, g)
            else:
                (h1, c1), (h2, c2) = encode(tree[0], instance), encode(tree[1], instance)
                both = u("cat", lambda a, b: torch.cat([a, b]), h1, h2)
                i, f, o, g = self.gates(u, u("linear_h", F.linear, both, weight="W"))
                f = u("sigmoid", torch.sigmoid, f)
                old = u("add", torch.add, u("mul", torch.mul, f, c1), u("mul", torch.mul, f, c2))
                c = u("add", torch.add, u("mul", torch.mul, i, g), old)
            h = u("mul", torch.mul, u("sigmoid", torch.sigmoid, o), u("tanh", torch.tanh, c))
            if classify_all:
                outputs.append(u(readout, F.linear, h, weight="O"))
            return h, c

        for instance, tree in enumerate(trees):
            h, _ = encode(tree, instance)
            if not classify_all:
                outputs.append(self.call(build, instance, "out", F.linear, h, weight="O"))
        return build.program(*outputs)

    def tagger(self, lengths: list[int]) -> Program:
        build, outputs = ProgramBuilder(len(lengths)), []
        for instance, n in enumerate(lengths):

            def u(*args: Any, instance: int = instance, **kw: Any) -> Any:
                return self.call(build, instance, *args, **kw)

            h = c = build.constant(torch.zeros(HIDDEN), instance=instance)
            for k in range(n):
                x = u(
                    "embed", lambda i, w: w[i], build.constant(torch.tensor(k), instance=instance), weight="E"
                )
                z = u(
                    "add",
                    torch.add,
                    u("linear_x", F.linear, x, weight="V"),
                    u("linear_r", F.linear, h, weight="R"),
                )
                i, f, o, g = self.gates(u, z)
                keep = u("mul", torch.mul, u("sigmoid", torch.sigmoid, f), c)
                c = u("add", torch.add, u("mul", torch.mul, i, g), keep)
                h = u("mul", torch.mul, u("sigmoid", torch.sigmoid, o), u("tanh", torch.tanh, c))
                outputs.append(u("out", F.linear, h, weight="O"))
        return build.program(*outputs)
