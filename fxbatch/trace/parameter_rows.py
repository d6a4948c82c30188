"""Rows of parameters that are chosen in Python: `self.embed.weight[word]`, `self.transitions[a, b]`.

In: a real tensor that meets values, a view of a parameter or buffer. Out: the value of a look-up with the row's number
as an input, so that calls with other rows share their launches; None where the view itself is to be used.

    word = row_of_parameter(recorder, model.embed.weight[7])       # embed.weight, 7 -> f32[32]

A parameter whose rows are few (one a gate, one a layer) stays as it is: a row is looked up once more than MANY_ROWS
were met. Matrices are never, since a product with one matrix for all calls is worth more than a shared launch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fxbatch.trace.bare_parameters import VIEW_KEY, BareView
from fxbatch.trace.columns import ExtensionSwitch, _fast
from fxbatch.trace.recorded_calls import RecordedCalls
from fxbatch.trace.values import Value

MANY_ROWS = 4


def take_parameter_row(parameter: torch.Tensor, row: torch.Tensor, leading: int) -> torch.Tensor:
    """Row `row` of a parameter whose `leading` first dimensions are taken as one."""
    shape = parameter.shape[leading:]
    return F.embedding(row, parameter.reshape(-1, shape.numel())).reshape(shape)


def row_of_parameter(recorder: RecordedCalls, t: torch.Tensor) -> Any:
    """The value of a real tensor that is one of many rows of a parameter or buffer; None for others."""
    if type(t) is BareView and (shown := vars(t).get(VIEW_KEY)) is not None:
        return shown if type(shown) is Value else None
    base = t._base
    if base is None or t.dim() > 1:
        return None
    key = (
        id(base), t.storage_offset(), t.stride(), t.shape, t.dtype, t.grad_fn is None, t.is_conj(),
        t.is_neg(), recorder.mode,
    )  # fmt: skip
    found = recorder.parameter_rows.get(key)
    if found is None:
        row, strides = recorder.row_numbers.get(key, (None, None))
        if row is None or strides != base.stride():
            row = _row(recorder, t, base)
            if row is None:
                return None
            recorder.row_numbers[key] = row, base.stride()
        args = base, recorder.number(row, torch.int64, t.device), base.dim() - t.dim()
        if ExtensionSwitch.on:
            found = _fast.recorded_before(recorder, take_parameter_row, args, {})
        if found is None:
            found = recorder.call(take_parameter_row, args, {})
        recorder.parameter_rows[key] = found
    return found


def _row(recorder: RecordedCalls, t: torch.Tensor, base: torch.Tensor) -> int | None:
    """The row's number, where t is a whole row of a parameter with many of them."""
    leading, width = base.dim() - t.dim(), t.numel()
    if (
        leading < 1
        or not width
        or t.layout is not torch.strided
        or not base.is_contiguous()
        or t.dtype != base.dtype
        or t.shape != base.shape[leading:]
        or not t.is_contiguous()
        or t.is_conj() != base.is_conj()
        or t.is_neg() != base.is_neg()
        or not gradients_go_through(recorder, t)
    ):
        return None
    shared = recorder.shared_operand(base)
    row, rest = divmod(int(t.storage_offset()) - int(base.storage_offset()), width)
    if shared is None or rest or base.is_meta:
        return None
    with recorder.table.lock:
        met = recorder.table.parameter_rows.setdefault((shared.key, leading), set())
        if len(met) <= MANY_ROWS:
            met.add(row)
        return row if len(met) > MANY_ROWS else None


def gradients_go_through(recorder: RecordedCalls, view: torch.Tensor) -> bool:
    """Whether a view of a parameter takes part in gradients as the parameter does: not one made under `no_grad`."""
    assert view._base is not None
    return not (recorder.grad and view._base.requires_grad) or view.grad_fn is not None
