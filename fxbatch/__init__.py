"""fxbatch: write the model for one instance, run it on a minibatch.

class Model(nn.Module):
    @fxbatch.autobatch
    def forward(self, tree): ...

model(trees)
"""

from __future__ import annotations

from fxbatch.decorator import autobatch, disabled
from fxbatch.errors import (
    BatchCoupledError,
    BlockTypeError,
    CompileWarning,
    DataError,
    FxbatchError,
    GradientError,
    InPlaceError,
    InstanceError,
    MinibatchError,
    OptionError,
    ResultError,
    StaleTraceError,
    TraceError,
    VerifyError,
)
from fxbatch.explanation import Explanation
from fxbatch.inspection import Minibatch, compile_minibatch, explain
from fxbatch.trace.operations import operation
from fxbatch.traced import TracedDataset, collate, lazy, prefetch, trace

__version__ = "0.1.0"

__all__ = [
    "BatchCoupledError",
    "BlockTypeError",
    "CompileWarning",
    "DataError",
    "Explanation",
    "FxbatchError",
    "GradientError",
    "InPlaceError",
    "InstanceError",
    "Minibatch",
    "MinibatchError",
    "OptionError",
    "ResultError",
    "StaleTraceError",
    "TraceError",
    "TracedDataset",
    "VerifyError",
    "autobatch",
    "collate",
    "compile_minibatch",
    "disabled",
    "explain",
    "lazy",
    "operation",
    "prefetch",
    "trace",
]
