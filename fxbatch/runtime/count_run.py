"""What a batched minibatch was made of, as counts.

    counts = count_run(run, recording, new=0)          # Counts(instances=64, calls=6592, steps=28, ...)

Counted once in a while, so it may look at each phase: about 10 microseconds a phase.
"""

from __future__ import annotations

import numpy as np

from fxbatch.ir import CONSTANT_KINDS
from fxbatch.runtime.costs import Counts
from fxbatch.runtime.operation_cache import CompiledOperation
from fxbatch.runtime.postponed import REASON
from fxbatch.runtime.run import Run
from fxbatch.trace.minibatch import Recording

WRITE = 4  # calls that are recorded in Python besides, which new contents in place take as long as
_CONSTANT, _NATIVE, _PYTHON, _UNBATCHED, _LATE = range(5)


def count_run(run: Run, recording: Recording, *, new: int, packed: int = 0) -> Counts:
    """The counts of a run that has been through all its phases.

    new: signatures that it met first; packed: steps of packed calls.
    """
    steps, calls = np.zeros(5, dtype=np.int64), np.zeros(5, dtype=np.int64)
    late: set[CompiledOperation] = set()
    phases = [phase for part in (*run.segments, run) for phase in part.phases]
    for phase in phases:
        kinds = np.array([_CONSTANT if c is None else _kind(c) for c in phase.compiled], dtype=np.int64)
        of_step = kinds[phase.plan.step_signature]
        steps += np.bincount(of_step, minlength=5)
        calls += np.bincount(of_step, weights=phase.plan.step_rows, minlength=5).astype(np.int64)
        late.update(c for c in phase.compiled if c is not None and c.reason == REASON)
    return Counts(
        instances=len(recording.results),
        calls=int(calls.sum()),
        long_calls=recording.recorder.long_calls + WRITE * len(recording.recorder.rewritten),
        new=new,
        steps=int(steps[_NATIVE]),
        python_steps=int(steps[_PYTHON]) + packed,
        unbatched=int(calls[_UNBATCHED]),
        late_steps=int(steps[_LATE]),
        late=len(late),
        late_calls=int(calls[_LATE]),
        phases=len(phases),
        waits=recording.statistics.suspensions,
        grad=run.grad,
    )


def _kind(compiled: CompiledOperation) -> int:
    if compiled.signature.operation.kind in CONSTANT_KINDS:
        return _CONSTANT
    if compiled.reason:
        return _LATE if compiled.reason == REASON else _UNBATCHED
    return _PYTHON if compiled.native_forward is None else _NATIVE
