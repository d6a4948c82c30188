"""The C extension: what it recycles, what it must not, and that nothing leaks."""

from __future__ import annotations

import gc
import itertools
import resource
import sys
import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fxbatch
from fxbatch import operation
from fxbatch.errors import TraceError
from fxbatch.ir import TensorSpec, tensor_spec
from fxbatch.trace import modules, state
from fxbatch.trace.minibatch import Recording, record_minibatch
from fxbatch.trace.record import Recorder
from fxbatch.trace.state import tracing
from fxbatch.trace.table import SignatureTable
from fxbatch.trace.values import Value
from tests.oracle import check_equal


class Cell(nn.Module):
    """Two inputs, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = self.linear(torch.cat([h, c])).chunk(2)
        return a.tanh(), b


class Chain(nn.Module):
    """A chain of cells over an instance's own tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()
        self.out = nn.Linear(3, 2)
        self.kept: list[Any] = []

    def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
        h, c = xs[0], xs[0]
        for x in xs:
            h, c = self.cell(h, x)
            h = h + c
        return self.out(h)


def record(model: nn.Module, instances: list[Any], table: SignatureTable) -> Recording:
    return record_minibatch(model.forward, [((x,), {}) for x in instances], table, None)  # type: ignore[arg-type]


def record_now(model: nn.Module, instances: list[tuple[Any, ...]], table: SignatureTable) -> Recording:
    """As a call that runs at once records."""
    given = [((model, *one), {}) for one in instances]
    return record_minibatch(type(model).forward, given, table, None, roots=(model,), runs_now=True)  # type: ignore[arg-type]


def _instances(n: int = 5) -> list[list[torch.Tensor]]:
    return [[torch.randn(3) for _ in range(i % 4 + 1)] for i in range(n)]


def text_of_programs() -> str:
    """What is recorded of a model twice, the second time with all calls known."""
    model, instances, table, found = Chain(), _instances(), SignatureTable(), []
    for _ in range(2):
        recording = record(model, instances, table)
        program = recording.pending_program(recording.output_ids())
        ids = {id(t): (i, k) for i, xs in enumerate(instances) for k, t in enumerate(xs)}
        columns = [getattr(program, name).tolist() for name in ("sig", "inputs", "instance", "outputs")]
        constants = [[ids[id(t)] for t in payload] for payload in program.constants.values()]
        found.append(f"{program}\n{columns}\n{constants}")
    return "\n".join(found)


def test_a_kept_value_stays_itself() -> None:
    """A Value that the user keeps is not handed out again; using it later is the error it always was."""

    class Keeping(Chain):
        def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
            h, c = self.cell(xs[0], xs[0])
            self.kept.append((h, h._value, c.shape))  # type: ignore[attr-defined]
            return self.out(h + c)

    model, table = Keeping(), SignatureTable()
    record(model, _instances(), table)
    before, model.kept = model.kept, []
    record(model, _instances(), table)
    assert len({id(v) for v, *_ in before + model.kept}) == len(before + model.kept)
    for v, number, shape in before:
        assert v._value == number and v.shape == shape
        with pytest.raises(TraceError, match="of a finished call"):
            v + 1


def test_what_was_set_on_a_value_does_not_come_back() -> None:
    """Attributes that the user set on a Value, and weak references to it, die with it."""
    seen: list[bool] = []

    class Marking(Chain):
        def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
            h, c = self.cell(xs[0], xs[0])
            seen.append(hasattr(h, "mark") or hasattr(c, "mark"))
            h.mark = c.mark = True  # type: ignore[attr-defined]
            self.kept.append(weakref.ref(c))
            del c
            return self.out(h)

    model, table = Marking(), SignatureTable()
    for _ in range(3):
        record(model, _instances(), table)
    gc.collect()
    assert seen and not any(seen)
    assert all(ref() is None for ref in model.kept)


def test_values_in_cycles_are_not_recycled() -> None:
    """The garbage collector may have cleared their tensors."""

    class Cyclic(Chain):
        def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
            h, c = self.cell(xs[0], xs[0])
            loop: list[Any] = [h, c]
            loop.append(loop)
            h.loop = loop  # type: ignore[attr-defined]
            return self.out(h + c)

    model, table = Cyclic(), SignatureTable()
    for _ in range(4):
        recording = record(model, _instances(8), table)
        values = [r for r in recording.results if type(r) is Value]
        assert [tuple(v.shape) for v in values] == [(2,)] * 8
        del recording, values
        gc.collect()


def test_nothing_leaks() -> None:
    """Memory and reference counts stay where they are, minibatch after minibatch."""
    model, table, instances = Chain(), SignatureTable(), _instances(16)
    watched = [instances[0][0], model.cell, table, torch.Tensor.__add__]

    def run(times: int) -> None:
        for _ in range(times):
            recording = record(model, instances, table)
            recording.pending_program(recording.output_ids())

    run(20)  # the pool has grown to what a minibatch needs
    gc.collect()
    counts = [sys.getrefcount(x) for x in watched]
    tracemalloc.start()
    resident, held = 0, []
    for _ in range(4):
        run(40)
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
        resident = resident or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.stop()
    # What leaks does so each time; in one of them others may have made something in this process.
    assert min(after - before for before, after in itertools.pairwise(held)) < 26_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident < 16_000  # KiB
    assert [sys.getrefcount(x) for x in watched] == counts


def test_column() -> None:
    """Both columns are what numpy and the recorder take them for."""
    c = state.new_column()
    assert np.array(c, dtype=np.int64).tolist() == []
    c.append(3)
    c.extend((1 << 41, -2))
    c.extend([])
    c.extend((7, 8))
    assert len(c) == 5 and c[-1] == 8 and c[0] == 3
    assert memoryview(c).tolist() == [3, 1 << 41, -2, 7, 8]
    assert np.array(c, dtype=np.int64).dtype == np.int64
    with memoryview(c), pytest.raises(BufferError):
        c.append(1)
    with pytest.raises((TypeError, OverflowError)):
        c.extend((1, "x"))
    for i in range(1000):
        c.append(i)
    assert c[len(c) - 1] == 999
    with pytest.raises(IndexError):
        c[2000]


def test_the_table_of_calls(recorded_by: str) -> None:
    """Found by function and arguments, plain data by type and content; replaced, cleared; none taken for another."""
    if recorded_by == "python":
        pytest.skip("the table of calls is in C")
    table = SignatureTable()
    recorder = Recorder(table)
    weight, real = nn.Parameter(torch.ones(2)), torch.ones(4)
    with tracing(recorder):
        v, w = recorder.constant(torch.ones(3)), recorder.constant(torch.ones(3, dtype=torch.int64))
        plain = [
            0,
            1,
            -1,
            True,
            False,
            0.0,
            -0.0,
            1.0,
            None,
            ...,
            "a",
            "b" * 50,
            torch.float32,
            torch.device("cpu"),
        ]
        plain += [
            torch.device("meta"),
            slice(1),
            slice(0, 1),
            slice(1, None),
            slice(None, None, 2),
            weight,
            real,
            v,
            w,
        ]
        plain += [
            [v, w],
            [w, v],
            (v, w),
            [v] * 100,
            [v] * 101,
            (1, 2),
            [1, 2],
            torch.Size([1, 2]),
            ([1], [2]),
            [[1, 2]],
        ]
        calls = [(f, (v, x), {}) for f in (torch.add, torch.mul) for x in plain]
        calls += [(torch.add, (v,), {"other": x}) for x in plain] + [
            (torch.add, (v,), {"out": 1}),
            (torch.add, (), {}),
        ]
        entries = [
            table.constant(tensor_spec((n,), torch.float32, torch.device("cpu"))) for n in range(len(calls))
        ]
        for call, entry in zip(calls, reversed(entries), strict=True):
            assert state._fast.recorded_before(recorder, *call) is None
            recorder.remember(*call, entry)
        for call, entry in zip(calls, entries, strict=True):
            recorder.remember(*call, entry)  # what a call's code reads has changed
        assert len(recorder.knowledge.call_table) == len(calls)
        before = [state._fast.recorded_before(recorder, *call).shape for call in calls]
        assert before == [(n,) for n in range(len(calls))]
        equal = [(torch.add, (v, "".join(["b"] * 50)), {}), (torch.add, (v, torch.device("cpu", None)), {})]
        assert [state._fast.recorded_before(recorder, *call).shape for call in equal] == [(11,), (13,)]
        for x in (float("nan"), 1 << 70, object(), {"a": v}, [[[[v]]]], np.float64(1)):  # looked at closely
            recorder.remember(torch.add, (v, x), {}, entries[0])
            assert state._fast.recorded_before(recorder, torch.add, (v, x), {}) is None
        with torch.no_grad():
            assert state._fast.recorded_before(recorder, *calls[0]) is None
        recorder.knowledge.call_table.clear()
        assert state._fast.recorded_before(recorder, *calls[0]) is None


def test_what_an_instance_brings_is_free_when_its_call_is_over() -> None:
    """Constants, lifted numbers and their Values wait for no collection of garbage."""
    import fxbatch

    model = nn.Linear(3, 3)

    @fxbatch.autobatch
    def call(x: torch.Tensor) -> torch.Tensor:
        own = torch.ones(3)
        own_refs.append(weakref.ref(own))
        return model(x) * 2 + own.sum() * model(own) * 0.5

    own_refs: list[Any] = []
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            call([torch.ones(3)] * 2)
            gc.collect()
            own_refs.clear()
            gc.disable()
            try:
                result = call([torch.ones(3)] * 2)
                del result
                assert [ref() for ref in own_refs] == [None, None]
            finally:
                gc.enable()


def test_requires_grad_of_a_value_that_outlives_its_call() -> None:
    """What constants require is known after they were let go."""
    import fxbatch

    kept: list[Any] = []

    @fxbatch.autobatch
    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kept.append((torch.tanh(x), torch.tanh(y)))
        return kept[-1][0] + kept[-1][1]

    call([torch.ones(2, 2, requires_grad=True)] * 2, [torch.ones(2, 2)] * 2)
    assert [(a.requires_grad, b.requires_grad) for a, b in kept] == [(True, False)] * 2


@operation
def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x])


def test_constants_are_told_apart_by_shape_type_and_device(recorded_by: str) -> None:
    """Few types are compared one by one, many are looked up; each is met more than once."""
    kinds = [
        torch.empty(shape, dtype=dtype, device=device)
        for shape in ((), (1,), (2,))
        for dtype in (torch.float32, torch.int64)
        for device in ("cpu", "meta")
    ]
    for few in (4, len(kinds)):
        xs = [torch.empty_like(t) for t in kinds[:few] for _ in range(3)]
        others = {id(x): torch.empty_like(x) for x in xs}
        recording = record_minibatch(
            lambda x: torch.maximum(twice(x), others[id(x)]),  # noqa: B023 - called before the next round
            [((x,), {}) for x in xs],
            SignatureTable(),
            None,  # type: ignore[arg-type]  # nothing is run
        )
        for x, result in zip(xs, recording.results, strict=True):
            assert (result.shape, result.dtype, result.device) == ((2, *x.shape), x.dtype, x.device)
        program = recording.pending_program(recording.output_ids())
        found = {program.signatures[s].outputs[0]: payload for s, payload in program.constants.items()}
        assert len(found) == few and all(len(payload) == 6 for payload in found.values())
        for kind, payload in found.items():
            assert all(TensorSpec.of(t) == kind for t in payload)


def test_views_are_recorded_in_c_and_handed_out_again(recorded_by: str) -> None:
    """Rows, slices and parts of values, once met, take no call of Python functions, and written views still count."""

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            v = self.linear(x)
            matrix = v[:, None] + v[None]
            total = matrix[1, 2] + matrix[3].sum() + v[-1] + v[1:3].sum()
            for part in v.unbind():
                total = total + part
            for row in matrix:
                total = total + row[0]
            row = matrix[2]
            row += v
            return total + matrix[2].sum() + v.view(2, 2)[1].sum()

    model, table, slow = Views(), SignatureTable(), []
    for _ in range(3):
        xs = list(torch.randn(5, 4))
        recording = record(model, xs, table)
        slow.append(recording.recorder.long_calls)
        references = [weakref.ref(v) for v in recording.results]
        del recording
        gc.collect()
        assert not any(ref() is not None for ref in references)
    writes = 5 * 4  # `row += v`, its way back to the matrix, and the views of that anew
    assert recorded_by == "python" or slow[1] == slow[2] <= writes
    batched: Any = type("Batched", (Views,), {"forward": fxbatch.autobatch(adaptive=False)(Views.forward)})
    check_equal(batched(), list(torch.randn(5, 4)))


def test_setting_an_attribute_that_no_operation_reads_forgets_no_call(recorded_by: str) -> None:
    """A memory kept on a module (a neural Turing machine): each write made the whole call table be found anew."""

    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.memory = torch.zeros(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.memory = torch.zeros(4)
            for _ in range(3):
                before = self.memory
                self.memory = torch.ones(4)  # a real tensor, and then a value
                self.memory = before + self.linear(x)
            return self.memory

    model, table, slow = Memory(), SignatureTable(), []
    for _ in range(3):
        recording = record(model, list(torch.randn(5, 4)), table)
        slow.append(recording.recorder.long_calls)
        del recording
    assert recorded_by == "python" or slow[2] == 0
    batched: Any = type("Batched", (Memory,), {"forward": fxbatch.autobatch(adaptive=False)(Memory.forward)})
    check_equal(batched(), list(torch.randn(5, 4)))


class MadeWhereItIsCalled(nn.Module):
    """Modules without tensors that are made for one call, as public code of 2018 writes functions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = nn.Sigmoid()(self.linear(x))
        h = gate * nn.Tanh()(gate) + nn.LogSoftmax(dim=0)(nn.ReLU()(self.linear(gate)))
        hooked = nn.Softsign()
        hooked.register_forward_hook(lambda _, __, y: y * 2)
        return hooked(h) + nn.Sequential(nn.Softplus(), nn.Hardtanh())(h)


def test_modules_that_are_made_where_they_are_called_are_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[type] = []
    known = modules.call_module

    def call_module(recorder: Any, module: nn.Module, *given: Any) -> object:
        looked_at.append(type(module))
        return known(recorder, module, *given)

    monkeypatch.setattr(modules, "call_module", call_module)
    model, table = MadeWhereItIsCalled(), SignatureTable()
    for _ in range(3):
        looked_at.clear()
        record_now(model, [(x,) for x in torch.randn(5, 4)], table)
    assert not {nn.Sigmoid, nn.Tanh, nn.LogSoftmax, nn.ReLU} & {*looked_at}
    batched: Any = type(
        "Batched",
        (MadeWhereItIsCalled,),
        {"forward": fxbatch.autobatch(adaptive=False)(MadeWhereItIsCalled.forward)},
    )
    check_equal(batched(), list(torch.randn(5, 4)))


class PackedByHand(nn.Module):
    """An instance that packs sequences itself: the layer needs their sizes as numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(9, 4), nn.LSTM(4, 3)

    def forward(self, words: list[torch.Tensor]) -> torch.Tensor:
        rows = [self.embed(w) for w in words]
        packed = nn.utils.rnn.pack_sequence(rows, enforce_sorted=False)
        return self.rnn(packed)[1][0][0].sum(0)


def test_a_module_that_never_runs_on_fake_tensors_is_tried_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed: list[Exception] = []
    run_on_fakes = modules.run_on_fakes

    def tries(*given: Any, **how: Any) -> Any:
        try:
            return run_on_fakes(*given, **how)
        except Exception as error:
            failed.append(error)
            raise

    monkeypatch.setattr(modules, "run_on_fakes", tries)
    batched: Any = type(
        "Batched", (PackedByHand,), {"forward": fxbatch.autobatch(adaptive=False)(PackedByHand.forward)}
    )
    model = batched()
    model.eval()
    check_equal(model, [[torch.arange(n) for n in (m, 2, m + 3)] for m in range(1, 6)], gradients=False)
    assert len(failed) == modules.MANY_FAILED


class _OfItsOwn(nn.Module):
    """A module that an instance makes for itself, as an interpreter of programs does."""

    def __init__(self, drop: nn.Module, training: bool) -> None:
        super().__init__()
        self.shift = 2.0
        self.train(training)
        self.drop = drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x) * self.shift


@pytest.mark.parametrize("training", [True, False])
def test_a_module_of_an_instances_own_forgets_no_call(training: bool, recorded_by: str) -> None:
    """Its mode was set when it was made, and the whole call table was found anew, twice an instance."""

    class Interpreter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.drop = nn.Dropout(0.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            own = _OfItsOwn(nn.Identity(), self.training)
            return self.drop(self.linear(x).tanh()) * own.shift

    model, table, slow = Interpreter().train(training), SignatureTable(), []
    for _ in range(3):
        recording = record_now(model, [(x,) for x in torch.randn(5, 4)], table)
        recording.pending_program(recording.output_ids())
        slow.append(recording.recorder.long_calls)
        del recording
    assert recorded_by == "python" or slow[2] == 0
    batched: Any = type(
        "Batched", (Interpreter,), {"forward": fxbatch.autobatch(adaptive=False)(Interpreter.forward)}
    )
    check_equal(batched().train(training), list(torch.randn(5, 4)))


def test_a_part_of_a_module_of_an_instances_own_changes_its_mode() -> None:
    """Dropout(1.0) gives zeros, and x once it is in eval mode: by itself, as a part, as a part that was called."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            alone = nn.Dropout(1.0)
            a = alone(h)
            alone.eval()
            b = alone(h)
            drop = nn.Dropout(1.0)
            own = _OfItsOwn(drop, training=True)
            c = own(h)
            drop.training = False
            d = own(h)
            own.drop = nn.Dropout(1.0)
            e = own(h)
            own.drop = drop.train(False)
            own.shift = 3.0
            return torch.stack([a, b, c, d, e, own(h)])

    batched: Any = type("Batched", (Model,), {"forward": fxbatch.autobatch(adaptive=False)(Model.forward)})
    model = batched()
    for _ in range(2):
        check_equal(model, list(torch.randn(5, 4)))


def test_numbers_that_differ_are_recorded_in_c(recorded_by: str) -> None:
    """Margins, temperatures and weights of a node's own: a number of each, and those that vary within an instance."""

    class Margins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, weight: float, count: int) -> torch.Tensor:
            h = self.linear(x)
            h = (h - 1 + 0.85) / 0.85 / 0.25
            h = h * weight + count * h
            h = h * 0.0 - h * -0.0 + h * 2 + h * 2.0 + (h + 0) - (0.0 + h)
            h *= weight
            return h / (count + 1) + torch.add(h, weight)

    rng = torch.Generator().manual_seed(0)

    def minibatch() -> list[tuple[Any, ...]]:
        return [
            (x, float(torch.rand((), generator=rng)), i)
            for i, x in enumerate(torch.randn(6, 4, generator=rng))
        ]

    model, table, slow = Margins(), SignatureTable(), []
    for _ in range(4):
        recording = record_now(model, minibatch(), table)
        recording.pending_program(recording.output_ids())
        slow.append(recording.recorder.long_calls)
        del recording
    assert recorded_by == "python" or slow[3] == 0, slow
    batched: Any = type(
        "Batched", (Margins,), {"forward": fxbatch.autobatch(adaptive=False)(Margins.forward)}
    )()
    for _ in range(3):
        batch = minibatch()
        got = batched(*zip(*batch, strict=True))
        wanted = torch.stack([Margins.forward(batched, *one) for one in batch])
        torch.testing.assert_close(got, wanted)
