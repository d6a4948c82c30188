"""The errors that users meet: one base class, one subclass a kind of mistake.

Every message names what was expected, what was met and, where there is one, the user's own line:
`cell: input 1 takes f32[4], got f32[8] (model.py:31)`.
"""

from __future__ import annotations


class FxbatchError(Exception):
    """Base class of all errors that fxbatch raises on purpose."""


class OptionError(FxbatchError, ValueError):
    """An unknown option, or a value that an option does not take."""


class MinibatchError(FxbatchError, ValueError):
    """The arguments of a decorated call are no minibatch: lengths differ, wrong container."""


class ResultError(FxbatchError, ValueError):
    """The results of the instances can't be put together as `out=` asks."""


class TraceError(FxbatchError):
    """The per-instance forward did something that can't be recorded correctly."""


class InPlaceError(TraceError):
    """A write to a value or a tensor that can't be functionalised with exact semantics."""


class BatchCoupledError(TraceError):
    """An operation would mix instances or change shared state (BatchNorm in training)."""


class InstanceError(FxbatchError):
    """The user's forward raised for one instance; `instance` is its index in the minibatch."""

    def __init__(self, message: str, instance: int | None = None) -> None:
        super().__init__(message)
        self.instance = instance


class StaleTraceError(FxbatchError):
    """A cached trace does not fit the model as it is now (mode, operations, types)."""


class VerifyError(FxbatchError):
    """A form breaks one of its invariants; the message shows the form and the line."""


class GradientError(FxbatchError, RuntimeError):
    """A gradient that the chosen backward can't give (double backward under `compiled`)."""


class DifferenceError(FxbatchError):
    """What `autobatch(check=N)` found: batched is not what the undecorated loop gives. `instance` is its index in the
    minibatch, `operation` the first one that differs, None and "" where that can't be told."""

    def __init__(self, message: str, instance: int | None = None, operation: str = "") -> None:
        super().__init__(message)
        self.instance = instance
        self.operation = operation


class DataError(FxbatchError, ValueError):
    """A data file is malformed or missing; the message gives file and line."""


class MissingDataError(DataError):
    """A data set is in none of the folders that were searched."""


class BlockTypeError(FxbatchError, TypeError):
    """Two blocks are composed whose types disagree."""


class BlockValueError(BlockTypeError, ValueError):
    """Blocks are wired as no composition can be (a cycle, an input read twice), or made with a value out of range."""


class UnorderedRecordError(BlockTypeError, RuntimeError):
    """A Record of a plain dict, whose blocks have no order, is given a tuple."""


class CompileWarning(UserWarning):
    """An operation graph runs uncompiled although `compile=` asked for more; the message says why."""


class InternalWarning(UserWarning):
    """A mistake inside fxbatch made an operation run call by call: right, but slow; `verify=True` raises it."""


class CheckWarning(UserWarning):
    """`autobatch(check=N)` could not compare something: it depends on random numbers, or the loop doesn't repeat it."""


class LoopWarning(UserWarning):
    """Minibatches run the plain loop, which is estimated to be faster than batching them (`adaptive=True`)."""
