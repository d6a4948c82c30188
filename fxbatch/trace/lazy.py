"""Lazy use: per-instance code in a plain Python loop; values run in batches when one is read.

In: an Execution. Out: a context in which torch functions and modules that meet `batch.value(x)` (or real
tensors, for
modules) are recorded; reading a value, `.backward()` or leaving the block runs everything pending.

    with LazyBatch(table, execution, (model,)) as batch:
        losses = [model.loss(x) for x in data]
        sum(losses).backward()
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from fxbatch.torch_private import tree_map
from fxbatch.trace.left_behind import LeftBehind
from fxbatch.trace.minibatch import LazyExecution
from fxbatch.trace.record import Recorder
from fxbatch.trace.state import tracing
from fxbatch.trace.statistics import Statistics
from fxbatch.trace.table import SignatureTable
from fxbatch.trace.torch_patches import patched
from fxbatch.trace.user_line import user_place
from fxbatch.trace.values import Value


class LazyBatch:
    """The recorder part of `fxbatch.lazy`.

    Values stay readable after the block; used there, they are real tensors.
    """

    def __init__(
        self, table: SignatureTable, execution: LazyExecution, roots: Sequence[torch.nn.Module] = ()
    ) -> None:
        self.recorder = Recorder(table, roots, 1)
        self.execution = execution
        self.statistics = Statistics(1)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> LazyBatch:
        self.recorder.ask = self._ask
        self.recorder.give = self._give
        self._stack.enter_context(patched())
        self._stack.enter_context(tracing(self.recorder))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
        if error is None:
            self.run()
        self.recorder.finish()
        left = LeftBehind.of(self.recorder, held=False)
        if left is not None and error is not None:
            left.abandon()
        elif left is not None:
            left.give(self._give(left.values))
        if error is None:
            self.recorder.ask = self._ask

    def value(self, x: torch.Tensor) -> Any:
        """A real tensor as a value of this batch, so that plain torch functions of it are recorded."""
        found = self.recorder.constant(x)
        return x if found is None else found

    def run(self) -> None:
        """Run everything pending as one batch."""
        if self.recorder.pending:
            calls = self.recorder.pending
            program = self.recorder.pending_program([])
            with tracing(None):
                self.execution.run(program)
            self.statistics.phase(calls, [0])

    def real(self, results: Any) -> Any:
        """A pytree with its Values replaced by real, differentiable tensors."""
        found: list[Value] = []
        tree_map(lambda x: found.append(x) if type(x) is Value else None, results)
        real = iter(self._give(found))
        return tree_map(lambda x: next(real) if type(x) is Value else x, results)

    def _ask(self, values: list[Value], plain: bool = False) -> list[Any]:
        self.statistics.asked(user_place(), len(values))
        self.run()
        with tracing(None):
            read = self.execution.numbers if plain else self.execution.read
            return read([v.id for v in values])

    def _give(self, values: list[Value]) -> list[torch.Tensor]:
        self.run()
        with tracing(None):
            return self.execution.materialise([v.id for v in values])
