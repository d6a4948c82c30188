"""Traces: plain data, merged with offsets, refused when the model has changed."""

from __future__ import annotations

import dataclasses
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fxbatch.errors import StaleTraceError, TraceError
from fxbatch.trace.table import SignatureTable
from fxbatch.trace.traces import Trace, join_columns, merge, trace_instance
from tests.trace.reference import ReferenceExecution
from tests.trace.test_record import Tree, TreeLSTM, tree


class Weighted(nn.Module):
    """Lifted numbers, lifted indices, bare parameters, views."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Any) -> Any:
        tensor, weight, index = x
        h = self.linear(tensor) * weight + self.scale
        h = h * 2.0
        h[0] = 1.0
        return {"row": h[index], "all": (h @ self.linear.weight).tanh()}


def traced(model: nn.Module, instances: list[Any], table: SignatureTable) -> list[Trace]:
    found = [trace_instance(model.forward, (x,), {}, table, ReferenceExecution(), model) for x in instances]
    return [pickle.loads(pickle.dumps(t)) for t in found]


def test_merged_traces_equal_the_loop() -> None:
    model, generator = TreeLSTM(), random.Random(0)
    trees = [tree(n, generator) for n in (1, 4, 2, 9)]
    traces = traced(model, trees, SignatureTable())
    for table in (SignatureTable(), SignatureTable()):
        got = ReferenceExecution().results(merge(traces, table, model))
        for g, t in zip(got, trees, strict=True):
            torch.testing.assert_close(g, model(t))


def test_lifted_numbers_and_structure() -> None:
    model = Weighted()
    data = [(torch.randn(4), 0.5 * k, k) for k in range(4)]
    got = ReferenceExecution().results(merge(traced(model, data, SignatureTable()), SignatureTable(), model))
    for g, x in zip(got, data, strict=True):
        want = model(x)
        assert list(g) == list(want)
        torch.testing.assert_close(g, want)


def test_no_traces() -> None:
    recording = merge([], SignatureTable(), TreeLSTM().train())
    assert recording.results == [] and len(recording.pending_program([])) == 0


@pytest.mark.parametrize("change", ["mode", "shape"])
def test_a_changed_model_is_refused(change: str) -> None:
    model = TreeLSTM()
    traces = traced(model, [tree(3, random.Random(0))], SignatureTable())
    if change == "mode":
        model.eval()
        match = "training mode.*eval mode"
    else:
        model.out = nn.Linear(6, 5)
        match = r"f32\[3,6\].*f32\[5,6\]"
    with pytest.raises(StaleTraceError, match=match):
        merge(traces, SignatureTable(), model)


def test_why_a_trace_is_not_cacheable() -> None:
    model = Weighted()

    def reason(fn: Any) -> str:
        t = trace_instance(fn, (torch.ones(4),), {}, SignatureTable(), ReferenceExecution(), model)
        return t.not_cacheable

    assert reason(lambda x: model.linear(x)) == ""
    assert "random" in reason(lambda x: model.linear(x) + torch.randn(4))
    assert "parameters" in reason(lambda x: model.linear(x) + model.scale.exp())
    with pytest.raises(TraceError, match="branches on values"):
        reason(lambda x: model.linear(x) if model.linear(x).sum() > 0 else x)


def test_printed_form() -> None:
    model = TreeLSTM()
    (t,) = traced(model, [Tree(word=torch.tensor(3))], SignatureTable())
    assert str(t).splitlines()[:2] == ["%0 = constant() : i64[]", "%1 = embed(%0) : f32[6]"]
    assert str(t).splitlines()[-1].startswith("return %")


def test_columns_are_joined() -> None:
    model, generator = TreeLSTM(), random.Random(3)
    table = SignatureTable()
    traces = traced(model, [tree(n, generator) for n in (1, 5, 2, 7)], table)
    ids = [np.arange(len(t.signatures), dtype=np.int32)[::-1] + 3 * k for k, t in enumerate(traces)]
    sigs, inputs = join_columns(traces, ids)
    assert sigs.dtype == np.int32 and inputs.dtype == np.int64
    read = value = 0
    for t in traces:
        assert inputs[read : read + len(t.inputs)].tolist() == (t.inputs + value).tolist()
        read, value = read + len(t.inputs), value + t.values
    assert read == len(inputs)
    start = 0
    for t, mapping in zip(traces, ids, strict=True):
        assert sigs[start : start + len(t)].tolist() == [mapping[s] for s in t.sig.tolist()]
        start += len(t)


def test_a_trace_that_names_what_it_does_not_have_is_refused() -> None:
    (t,) = traced(TreeLSTM(), [tree(3, random.Random(0))], SignatureTable())
    ids = [np.arange(len(t.signatures), dtype=np.int32)]
    for change in ({"inputs": t.inputs + t.values}, {"inputs": t.inputs - t.values}, {"sig": t.sig + 100}):
        with pytest.raises(IndexError, match="that it does not have"):
            join_columns([dataclasses.replace(t, **change)], ids)
