"""What is an operation, what is traced through, what is refused."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import fxbatch
from fxbatch.errors import BatchCoupledError, InPlaceError, TraceError
from fxbatch.ir import TensorSpec
from fxbatch.torch_private import FakeTensorMode
from fxbatch.trace.calls import operation
from fxbatch.trace.modules import MOST_CALLS
from fxbatch.trace.operations import MARKED, PLAIN_MODULE, TORCH_MODULE, run_on_fakes
from fxbatch.trace.table import SignatureTable
from tests.oracle import check_equal as check_model
from tests.trace.oracle import check_equal, recorded

X = [torch.randn(4, generator=torch.Generator().manual_seed(k)) for k in range(4)]
LIN = nn.Linear(4, 4)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any, *, scale: float = 1.0) -> Any:
        return {"y": self.b(self.a(x).tanh()) * scale, "n": 3}


class Root(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Any) -> Any:
        return self.part(x)


def names(table: SignatureTable) -> dict[str, str]:
    return {
        s.name: s.operation.rule for s in table.signatures if s.operation.kind not in ("constant", "number")
    }


def reasons(table: SignatureTable) -> dict[str, str]:
    return {t.name: t.reason for t in table.traced_through.values()}


def test_rules() -> None:
    table = SignatureTable()
    check_equal(Root(Two()).forward, X, table=table)
    assert names(table) == {"part": PLAIN_MODULE}
    table = SignatureTable()
    check_equal(Root(nn.Linear(4, 4)).forward, X, table=table)
    assert names(table) == {"part": TORCH_MODULE}


def test_keyword_arguments_split_only_when_they_differ() -> None:
    table, two = SignatureTable(), Two()
    check_equal(lambda x: (two(x), two(x, scale=2.0), two(x, scale=2.0)), X, list(two.parameters()), table)
    assert [s.name for s in table.signatures].count("Two") == 2


def test_hooks_are_traced_through_and_see_values() -> None:
    seen: list[Any] = []
    two = Two()
    two.a.register_forward_hook(lambda m, args, out: seen.append(type(out).__name__))
    table = SignatureTable()
    check_equal(Root(two).forward, X, list(two.parameters()), table)
    assert seen[:4] == ["Value"] * 4
    assert "hooks" in reasons(table)["Two"]


def test_a_cell_with_a_hook_is_given_a_parameter_and_a_state() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.cell = nn.Parameter(torch.randn(4)), nn.LSTMCell(4, 4)
            self.cell.register_forward_hook(lambda *_: None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.cell(self.start, (x, LIN(x)))[0]

    check_equal(Decoder(), X)


def test_a_module_that_branches_on_a_value_is_traced_through() -> None:
    class Branch(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2 if x.sum() > 0 else x - 1

    table = SignatureTable()
    check_equal(Root(Branch()).forward, X, table=table)
    assert "DataDependent" in reasons(table)["Branch"]


def test_a_module_that_takes_objects_is_traced_through() -> None:
    @dataclass
    class Item:
        x: Any

    class Takes(nn.Module):
        def forward(self, item: Any) -> Any:
            return LIN(item.x)

    table, takes = SignatureTable(), Takes()
    takes.lin = LIN
    check_equal(lambda x: takes(Item(x)), X, table=table)
    assert reasons(table)["Takes"] == "takes a Item, which it may change"


def test_users_code_that_takes_an_array_is_traced_through() -> None:
    class Takes(nn.Module):
        def forward(self, x: Any, a: Any) -> Any:
            return LIN(x) * float(a.astype(np.float64)[0])

    @operation
    def marked(x: Any, a: Any) -> Any:
        return x * float(a.astype(np.float64)[1])

    array, table, takes = np.array([2.0, 3.0], dtype=np.float32), SignatureTable(), Takes()
    takes.lin = LIN
    check_equal(lambda x: marked(takes(LIN(x), array), array), X, table=table)
    assert reasons(table)["Takes"] == "takes a ndarray, which it may change"
    assert "calls np.float64.astype()" in reasons(table)["marked"] or "ndarray" in reasons(table)["marked"]


class Times(enum.IntEnum):
    TWO = 2


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, by: Any) -> Any:
        ctx.by = 3.0 if by is Times.TWO else 5.0 if isinstance(by, int) else float(by.astype(np.float64)[0])
        return x * ctx.by

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * ctx.by, None


class ByTimes(nn.Module):
    def forward(self, x: Any, by: Any) -> Any:
        return LIN(x) * (3.0 if by is Times.TWO else 5.0)


def test_users_functions_that_are_one_operation_are_given_what_they_were_given() -> None:
    """Torch's functions take arrays as tensors and members of enumerations as numbers, users' code may not."""
    by_times = ByTimes()
    check_equal(lambda x: Scaled.apply(LIN(x), Times.TWO) + Scaled.apply(LIN(x), 2), X)
    check_equal(lambda x: functional_call(by_times, {}, (LIN(x), Times.TWO)), X)
    with pytest.raises(TraceError, match="got a recorded tensor together with a ndarray"):
        recorded(lambda x: Scaled.apply(LIN(x), np.ones(3)), X)


LOG: list[int] = []


class Logged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, row: Any) -> Any:
        LOG.append(1)
        return x * row[0]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, None


@pytest.mark.parametrize("turned", [False, True])
def test_a_users_function_that_is_not_plain_runs_call_by_call(turned: bool) -> None:
    """With a parameter, or a view of one."""
    weight = nn.Parameter(torch.randn(4, 4))

    check_equal(lambda x: Logged.apply(LIN(x), weight.t() if turned else weight), X)


def test_python_randomness_is_not_frozen() -> None:
    class Chance(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * 2 if random.random() < 0.5 else x

    chance, table = Chance(), SignatureTable()
    chance.lin = LIN
    got, _, _ = recorded(lambda x: chance(x), [torch.ones(2)] * 64, table)
    assert {g[0].item() for g in got} == {1.0, 2.0}
    assert "random" in reasons(table)["Chance"]


def test_state_kept_in_attributes_is_not_frozen() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Any) -> Any:
            self.calls += 1
            return x + self.calls

    counts = Counts()
    got, _, _ = recorded(lambda x: counts(x), [torch.zeros(1)] * 3)
    assert [g.item() for g in got] == [1.0, 2.0, 3.0]


def test_many_shapes_are_traced_through() -> None:
    two, table = Two(), SignatureTable()
    data = [torch.randn(k + 1, 4) for k in range(12)]
    check_equal(Root(two).forward, data, list(two.parameters()), table)
    assert "signatures" in reasons(table)["Two"]


def test_batch_norm_in_training_is_refused() -> None:
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(BatchCoupledError, match=r"BatchNorm1d.*test_rules.py:\d+"):
        recorded(lambda x: norm(x), [torch.randn(3, 4)])
    norm.eval()
    check_equal(lambda x: norm(x), [torch.randn(3, 4)])


def test_functional_batch_norm_in_training_is_refused() -> None:
    mean, var = torch.zeros(4), torch.ones(4)
    with pytest.raises(BatchCoupledError, match="batch_norm"):
        recorded(lambda x: F.batch_norm(LIN(x), mean, var, training=True), [torch.randn(3, 4)])


def test_a_written_buffer_is_refused() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x: Any) -> Any:
            self.total += x.detach()
            return x

    keeps = Keeps()
    with pytest.raises((BatchCoupledError, InPlaceError, TraceError)):
        recorded(lambda x: keeps(LIN(x)), X)
    assert (keeps.total == 0).all()


def test_writes_into_views_of_real_tensors() -> None:
    def fn(x: Any) -> Any:
        buffer = torch.zeros(2, 4)
        row = buffer[0]
        row += LIN(x)
        buffer[1] += row
        return buffer * 1, row * 2

    check_equal(fn, X, tuple(LIN.parameters()))

    def looked_at_elsewhere(x: Any) -> Any:
        buffer = torch.zeros(2, 4)
        row, other = buffer[0], buffer[1]
        row += LIN(x)
        return buffer + other

    with pytest.raises(InPlaceError, match=r"another tensor shares its memory.*test_rules.py:\d+"):
        recorded(looked_at_elsewhere, X)


def test_parameters_cannot_be_written() -> None:
    with pytest.raises((InPlaceError, BatchCoupledError, RuntimeError)):
        recorded(lambda x: LIN.weight.data.add_(LIN(x).detach()), X)
    with torch.no_grad(), pytest.raises((InPlaceError, BatchCoupledError)):
        recorded(lambda x: LIN.weight.add_(LIN(x)), X)


def test_a_constant_written_later_is_refused() -> None:
    def fn(x: Any) -> Any:
        t = torch.zeros(4)
        y = LIN(t)
        t += 1
        return y

    with pytest.raises(InPlaceError, match="written to after"):
        recorded(fn, X)


def test_a_constant_used_again_after_its_phase_may_be_written() -> None:
    def fn(x: Any) -> Any:
        t = torch.zeros(4)
        a = LIN(t).sum().item()
        t += 1
        return a, LIN(t)

    check_equal(fn, X)


def test_out_is_refused() -> None:
    with pytest.raises(InPlaceError, match="out="):
        recorded(lambda x: torch.add(LIN(x), 1, out=torch.empty(4)), X)


@pytest.mark.parametrize("factory", [torch.arange, torch.ones, torch.zeros])
def test_a_value_as_out_of_a_factory_is_refused(factory: Any) -> None:
    def written(x: Any) -> Any:
        h = LIN(x)
        h[0] = 1.0
        return h

    for out in (LIN, written):
        with pytest.raises(InPlaceError, match="out="):
            recorded(lambda x, out=out: factory(4, out=out(x)), X)


def test_a_new_tensor_of_a_value_s_type_may_be_out() -> None:
    """`torch.arange(n, out=v.data.new())`, for numbers where v is."""

    def fn(x: Any) -> Any:
        order = LIN(x).argsort()
        places = torch.arange(order.size(0), out=order.data.new())
        return (order == places).all().item(), order * places, order.new().resize_(2).fill_(3) + order[:2]

    for _ in range(3):
        check_equal(fn, X)


def test_marked_function_method_and_class() -> None:
    @operation
    def attend(q: Any, k: Any, *, temperature: float = 1.0) -> Any:
        return torch.softmax(k @ q / temperature, 0) @ k

    class Has(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        @operation
        def step(self, x: Any) -> Any:
            return self.linear(x).tanh()

        def forward(self, x: Any) -> Any:
            return attend(self.step(x), torch.stack([x, self.step(x)]), temperature=2.0)

    has, table = Has(), SignatureTable()
    check_equal(has.forward, X, list(has.parameters()), table)
    assert names(table)["attend"] == MARKED
    assert MARKED in names(table).values()
    assert len([n for n in names(table) if n != "stack"]) == 2


def test_tied_and_bare_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.out = nn.Linear(4, 10, bias=False)
            self.out.weight = self.embed.weight
            self.register_buffer("shift", torch.ones(10))

        def forward(self, i: Any) -> Any:
            return (
                self.out(self.embed(i).tanh()) @ self.embed.weight
                + (self.embed(i) @ self.out.weight.T + self.shift).sum()
            )

    tied = Tied()
    _, execution = check_equal(tied.forward, [torch.tensor(i) for i in range(5)], list(tied.parameters()))
    assert all(len(p.constants) == 1 for p in execution.programs)


def test_one_tensor_of_many_instances_is_one_constant() -> None:
    keys = torch.randn(3, 4)
    _, _, execution = recorded(lambda x: keys @ LIN(x), X)
    assert sum(len(v) for v in execution.programs[0].constants.values()) == len(X) + 1


def test_constants_that_require_gradients() -> None:
    leaves = [torch.randn(4, requires_grad=True) for _ in range(3)]
    check_equal(lambda x: LIN(x) * x.exp(), leaves, leaves)
    check_equal(lambda x: LIN(x) * LIN.weight.exp(), X, [LIN.weight])


def test_numbers_do_not_split_batches() -> None:
    table = SignatureTable()
    data = [(torch.randn(4, 4), 0.5 * k, k) for k in range(4)]
    fn = lambda t: LIN(t[0])[t[2]] * t[1] + t[2]  # noqa: E731
    got, _, execution = recorded(fn, [(d,) for d in data], table)
    for g, d in zip(got, data, strict=True):
        torch.testing.assert_close(g, fn(d))
    program = execution.programs[0]
    used = [program.signatures[s] for s in dict.fromkeys(program.sig.tolist())]
    kinds = [s.name for s in used if s.operation.kind == "function"]
    assert sorted(kinds) == ["add", "getitem", "mul"]


def test_a_number_that_never_varies_is_fixed() -> None:
    table = SignatureTable()
    _, execution = check_equal(lambda x: 1 - LIN(x) * 0.5, X, table=table)
    program = execution.programs[0]
    texts = [str(program.signatures[s]) for s in dict.fromkeys(program.sig.tolist())]
    assert "mul(f32[4]; 0.5) -> (f32[4])" in texts


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool]
)
def test_numbers_keep_dtypes(dtype: torch.dtype) -> None:
    data = [
        (torch.tensor([1, 0, 3]).to(dtype) if i % 2 else torch.tensor([2, 1, 5]).to(dtype), n)
        for i, n in enumerate([2, 2.5, -0.0, 0.0, 1e300, 2**40, True, float("nan"), float("inf")])
    ]

    def fn(pair: Any) -> Any:
        t, n = pair
        v = t + torch.zeros_like(t) if dtype is not torch.bool else t | t
        return v + n, v * n, v > n, v == n, n * v

    def values(pair: Any) -> Any:
        t, n = pair
        v = nn.Identity()(t)
        return v + n, v * n, v > n, v == n, n * v

    check_equal(values, [(d,) for d in data])


def test_index_errors_are_eager() -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        recorded(lambda x: LIN(x)[4], X)


def test_shape_errors_are_eager() -> None:
    with pytest.raises(RuntimeError, match="size of tensor a"):
        recorded(lambda x: LIN(x) + torch.ones(3), X)
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|mat1"):
        recorded(lambda x: LIN(x[:3].reshape(1, 3)), X)


def test_training_mode_is_looked_at_again() -> None:
    drop = nn.Dropout(0.999)

    def fn(x: Any) -> Any:
        drop.train()
        a = drop(LIN(x))
        drop.eval()
        return a, drop(LIN(x))

    got, _, _ = recorded(fn, [torch.ones(4)] * 4)
    for _, b in got:
        torch.testing.assert_close(b, LIN(torch.ones(4)))


def test_views_of_parameters_stay_shared() -> None:
    fn = lambda x: LIN(x) @ LIN.weight.T + LIN.weight[1:3].sum() * LIN(x) + LIN(x) @ LIN.weight[2]  # noqa: E731
    _, execution = check_equal(fn, X, list(LIN.parameters()))
    program = execution.programs[0]
    assert (
        sum(len(v) for s, v in program.constants.items() if program.signatures[s].outputs[0].shape == (4, 4))
        == 0
    )


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(3, 4, num_layers=2, bidirectional=True, dropout=0.5),
        nn.GRU(3, 4, batch_first=True),
        nn.RNN(3, 4, num_layers=2),
        nn.LSTM(3, 4, proj_size=2),
    ],
)
@pytest.mark.parametrize("steps", [1, 2, 30])
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_a_recurrent_layer_runs_one_step_on_fakes(
    layer: nn.Module, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    plain = FakeTensorMode.dispatch
    monkeypatch.setattr(
        FakeTensorMode, "dispatch", lambda self, f, *rest: calls.append(f) or plain(self, f, *rest)
    )
    x = torch.randn(*((2, steps) if layer.batch_first else (steps, 2)), 3)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    outcome = run_on_fakes(
        lambda inputs, shared: functional_call(layer, dict(zip(names, shared, strict=True)), tuple(inputs)),
        (TensorSpec.of(x),),
        parameters,
    )
    leaves = torch.utils._pytree.tree_leaves(layer(x))
    assert outcome.outputs == tuple(TensorSpec.of(t) for t in leaves)
    assert all(outcome.gradients) and not any(a >= 0 for a in outcome.aliases)
    assert outcome.random == (getattr(layer, "dropout", 0.0) > 0)
    assert len(calls) < 300, "steps are not run one by one"


class Reader(nn.Module):
    """A loop over a sequence, as a submodule: each length would be an operation of its own, as large as it is long."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(1, 4)
        for word in x.split(1):
            h = self.cell(word, h)
        return h


@pytest.mark.parametrize(("length", "whole"), [(20, True), (MOST_CALLS, False)])
def test_a_submodule_that_loops_over_a_sequence_is_recorded_by_its_parts(length: int, whole: bool) -> None:
    reader = Reader()
    _, execution = check_equal(
        lambda x: reader(x * 2), [torch.randn(length, 3)] * 2, list(reader.parameters())
    )
    names = {s.name for program in execution.programs for s in program.signatures}
    assert any("Reader" in name or "reader" in name for name in names) == whole, names


@pytest.mark.parametrize(
    ("lengths", "whole"), [((5, 6, 7, 5), 3), ((20, 40, 30, 20), 0), ((20, MOST_CALLS, 20), 0)]
)
def test_a_long_loop_of_other_lengths_is_recorded_by_its_parts(lengths: tuple[int, ...], whole: int) -> None:
    """The second long one tells that it is a loop; short ones are few operations."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.reader = nn.Linear(3, 3), Reader()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.reader(self.first(x)).tanh()

    model = Model()
    f = fxbatch.autobatch(adaptive=False)(model.forward)
    xs = [torch.randn(n, 3) for n in lengths]
    torch.testing.assert_close(torch.cat(list(f(xs))), torch.cat([model(x) for x in xs]))
    assert sum("reader(" in row.signature for row in fxbatch.explain(f, xs).operations) == whole


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Twice(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(2 * x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["same", "one wrapped", "both wrapped", "wrapper twice", "sequence"])
def test_a_module_that_is_reached_by_two_names_is_in_one_operation(how: str) -> None:
    layer = nn.Linear(4, 4)
    wrapper = Wrapped(layer)
    parts = {
        "same": Twice(layer, layer), "one wrapped": Twice(wrapper, layer), "wrapper twice": Twice(wrapper, wrapper),
        "both wrapped": Twice(wrapper, Wrapped(layer)), "sequence": nn.Sequential(layer, nn.ReLU(), layer),
    }  # fmt: skip

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.part = nn.Embedding(6, 4), parts[how]

        @fxbatch.autobatch(adaptive=False)
        def forward(self, word: torch.Tensor) -> torch.Tensor:
            return self.part(self.table(word)).sum()  # type: ignore[no-any-return]

    model, words = Net().double(), list(torch.arange(6).view(6, 1))
    found = model(words)
    with fxbatch.disabled():
        expected = model(words)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(r.sum(), list(model.parameters())) for r in (found, expected)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)
    names = [row.operation for row in fxbatch.explain(model, words).operations]
    assert not any("part." in name for name in names), names


@pytest.mark.parametrize(
    "code",
    [
        lambda h, x: h[[h.argmax() % 2]],
        lambda h, x: h[[h.argmax() % 2, h.argmin() % 2]],
        lambda h, x: h[[x[0, 0].long() * 0 + 1]],
        lambda h, x: 7 % (h.detach().abs() + 10) + h,
        lambda h, x: torch.remainder(2.5, h.detach().abs() + 10) + h,
        lambda h, x: h.sum(np.int64(0)),
        lambda h, x: h[np.int64(1)] + h[np.int32(-1), : np.int64(4)],
        lambda h, x: (h * 0 + h.sum().view(-1)[0].fill_(2), h)[1],
    ],
)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")
def test_arguments_in_other_forms(code: Any, grad: bool) -> None:
    """Lists of tensors as indices, which torch takes for tuples; numpy's integers; numbers first."""

    class Asked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(3, 4)

        @fxbatch.autobatch(adaptive=False)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return code(self.lin(x), x)

    with torch.set_grad_enabled(grad):
        check_model(Asked(), [torch.randn(2, 3) for _ in range(4)])
