"""The recorder: how calls of the user's code on Values become recorded calls.

In: torch functions, operators and indices that meet Values. Out: rows in the columns (`recorded_calls.py`), and Values.

    recorder = Recorder(table)
    recorder.call(torch.tanh, (value,), {})
    program = recorder.pending_program([])       # and marks its calls as run
"""

from __future__ import annotations

from typing import Any

import torch

from fxbatch.errors import TraceError
from fxbatch.torch_private import tree_flatten, tree_unflatten
from fxbatch.trace.calls import call_function
from fxbatch.trace.python_numbers import call_row
from fxbatch.trace.recorded_calls import RecordedCalls
from fxbatch.trace.state import state
from fxbatch.trace.user_line import at_line
from fxbatch.trace.values import Value, with_values


class Recorder(RecordedCalls):
    """Records the calls of one minibatch."""

    def call(self, func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Record a call of a torch function."""
        if self.over and self.give is not None:
            return self._call_real(func, args, kwargs)
        if self.over or state.recorder is not self:
            raise TraceError(
                "a value of another minibatch (or of a finished call) was used: values live for one decorated call; "
                f"keep results instead{at_line()}"
            )
        if self.written:
            args, kwargs = with_values(args, kwargs)
        return call_function(self, func, args, kwargs)

    def _call_real(self, func: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """After a lazy block: the call on real tensors."""
        leaves, spec = tree_flatten((args, kwargs))
        mine = [x for x in leaves if type(x) is Value and x._recorder is self]
        assert self.give is not None
        real = dict(zip(map(id, mine), self.give(mine), strict=True))
        args, kwargs = tree_unflatten([real.get(id(x), x) for x in leaves], spec)
        return func(*args, **kwargs)

    def row_of(self, v: Value, index: int) -> Any:
        """Record `v[index]`."""
        if self.over or state.recorder is not self:
            return self.call(torch.Tensor.__getitem__, (v, index), {})
        return call_row(self, v, index)
