"""fxbatch: write the model for one instance, run it on a minibatch.

class Model(nn.Module):
    @fxbatch.autobatch
    def forward(self, tree): ...

model(trees)
"""

from __future__ import annotations

import gc
import sys
from types import ModuleType
from typing import Any

from fxbatch import extensions

extensions.check()

_collected = gc.isenabled()
gc.disable()  # what is imported stays; a collection meanwhile would look at all of torch, for 0.1 s
try:
    from fxbatch.decorator import autobatch
    from fxbatch.errors import (
        BatchCoupledError,
        BlockTypeError,
        CheckWarning,
        CompileWarning,
        DataError,
        DeadlineError,
        DifferenceError,
        FxbatchError,
        GradientError,
        InPlaceError,
        InstanceError,
        InternalWarning,
        LoopWarning,
        MinibatchError,
        MissingDataError,
        OptionError,
        QueueFullError,
        ResultError,
        StaleTraceError,
        StoppedError,
        TraceError,
        VerifyError,
    )
    from fxbatch.explanation import Explanation
    from fxbatch.inspection import Minibatch, compile_minibatch, explain
    from fxbatch.plain_loop import disabled
    from fxbatch.server import Server, live
    from fxbatch.server_stats import ServerStats
    from fxbatch.trace.calls import operation
    from fxbatch.traced import TracedDataset, collate, lazy, prefetch, trace
finally:
    if _collected:
        gc.enable()


class _CallablePackage(ModuleType):
    """`fxbatch.trace` is the function, and the package of that name: `import fxbatch.trace.modules` works too."""

    def __call__(self, model: Any, *args: Any) -> Any:
        return _trace(model, *args)


_trace = trace
_package = sys.modules["fxbatch.trace"]
_package.__class__ = _CallablePackage
_package.__doc__ = trace.__doc__
globals()["trace"] = _package  # type checkers go on seeing the function

__version__ = "0.1.0"

__all__ = [
    "BatchCoupledError",
    "BlockTypeError",
    "CheckWarning",
    "CompileWarning",
    "InternalWarning",
    "LoopWarning",
    "DataError",
    "DeadlineError",
    "DifferenceError",
    "Explanation",
    "FxbatchError",
    "GradientError",
    "InPlaceError",
    "InstanceError",
    "Minibatch",
    "MinibatchError",
    "MissingDataError",
    "OptionError",
    "QueueFullError",
    "ResultError",
    "Server",
    "ServerStats",
    "StaleTraceError",
    "StoppedError",
    "TraceError",
    "TracedDataset",
    "VerifyError",
    "autobatch",
    "collate",
    "compile_minibatch",
    "disabled",
    "explain",
    "lazy",
    "live",
    "operation",
    "prefetch",
    "trace",
]
