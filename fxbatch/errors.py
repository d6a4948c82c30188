"""The errors that users meet: one base class, one subclass per kind of mistake.

Every message names what was expected, what was met and, where there is one, the user's own line:
`cell: input 1 takes f32[4], got f32[8] (model.py:31)`.
"""

from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
    from collections.abc import Callable


class FxbatchError(Exception):
    """Base class of all errors that fxbatch raises on purpose."""


class OptionError(FxbatchError, ValueError):
    """An unknown option, or a value that an option does not take."""


class MinibatchError(FxbatchError, ValueError):
    """The arguments of a decorated call are not minibatches of one length, or not what the forward takes."""


class ResultError(FxbatchError, ValueError):
    """The results of the instances can't be stacked, or nested: their shapes or structures differ. See `out="list"`."""


class TraceError(FxbatchError):
    """The forward did something that can't be batched exactly. The message names your line.

    By default the plain loop runs instead, and a LoopWarning says the same. With `adaptive=False`, in traces and in
    `explain` it is this error.
    """

    again = False  # whether the minibatch can be run by the loop instead: modules are what they were before
    begun = 0  # instances that had begun
    of_operation = False  # whether an operation has raised something, when it ran, that the forward may catch
    told: typing.ClassVar[Callable[[TraceError], None]] = lambda error: None  # of each (trace/state.py)

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        TraceError.told(self)


class InPlaceError(TraceError):
    """A write in place that can't be batched exactly, such as one through one of two views of an ordinary tensor."""


class BatchCoupledError(TraceError):
    """An operation would mix instances, or change what they share, such as BatchNorm in training."""


class InstanceError(FxbatchError):
    """The forward failed for one instance; `instance` is its index in the minibatch."""

    def __init__(self, message: str, instance: int | None = None) -> None:
        super().__init__(message)
        self.instance = instance


class StaleTraceError(FxbatchError):
    """A trace that was made ahead doesn't fit the model as it is now (mode, types), and can't be made again."""


class VerifyError(FxbatchError):
    """A mistake of fxbatch that `verify=True` found: a stage of a minibatch breaks one of its rules."""


class GradientError(FxbatchError, RuntimeError):
    """A gradient that the chosen backward can't give, such as a double backward with `backward="compiled"`."""


class DifferenceError(FxbatchError):
    """`autobatch(check=N)` compared a minibatch with the undecorated loop, and they differ.

    `instance` is the index of the instance in the minibatch, or None; `operation` the first one that differs, or "".
    """

    def __init__(self, message: str, instance: int | None = None, operation: str = "") -> None:
        super().__init__(message)
        self.instance = instance
        self.operation = operation


class DataError(FxbatchError, ValueError):
    """A data file is malformed or missing; the message gives file and line."""


class MissingDataError(DataError):
    """A data set is in none of the folders that were searched; the message names them."""


class QueueFullError(FxbatchError):
    """A server of live batches has as many requests in its queue as `max_queue` allows: ask again later."""


class DeadlineError(FxbatchError, TimeoutError):
    """The `timeout` of a request to a server of live batches is over; the request was ended."""


class StoppedError(FxbatchError):
    """A server of live batches takes no requests: it was stopped, or not started."""


class BlockTypeError(FxbatchError, TypeError):
    """Two blocks of `fxbatch.blocks` are composed whose types disagree."""


class BlockValueError(BlockTypeError, ValueError):
    """Blocks are wired as they can't be (a cycle, an input read twice), or made with a value out of range."""


class UnorderedRecordError(BlockTypeError, RuntimeError):
    """A `Record` that was made of a dict, whose blocks have no order, is given a tuple."""


class CompileWarning(UserWarning):
    """An operation runs uncompiled although `compile=` asked for more; the message says why."""


class InternalWarning(UserWarning):
    """A mistake of fxbatch made an operation run call by call: right, but slow. `verify=True` raises it."""


class CheckWarning(UserWarning):
    """`autobatch(check=N)` can't compare something: it depends on random numbers, or the loop doesn't repeat it."""


class LoopWarning(UserWarning):
    """Minibatches run the plain loop, which is faster or the only exact way; the message says why, with your line."""
