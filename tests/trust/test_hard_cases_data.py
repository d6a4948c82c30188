"""Hard cases of data: emptiness, memory and aliases, indices, coupling, types, sizes."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxbatch
from fxbatch.runtime.strategy import AdaptiveSwitch
from tests.oracle import assert_launches, check_equal
from tests.trust.programs import assert_equal, model, vectors


def linear(n: int = 4, m: int = 4) -> dict[str, Any]:
    return {"a": nn.Linear(n, m), "b": nn.Linear(n, m)}


# Emptiness


def test_empty_sequences() -> None:
    zero = nn.Buffer(torch.zeros(4))

    def forward(self: Any, words: Any) -> Any:
        h = self.zero
        for w in words:
            h = torch.tanh(self.a(h + w))
        return h

    made = assert_equal(forward, [[], vectors(4, 4), [], vectors(4)], {**linear(), "zero": zero})
    check_equal(made, [[], []])


def test_empty_minibatch() -> None:
    made = model(lambda self, x: self.a(x), linear())
    assert made([]).shape[0] == 0
    assert model(lambda self, x: self.a(x), linear(), out="list")([]) == []
    with torch.no_grad():
        assert made(torch.zeros(0, 4)).shape[0] == 0


@pytest.mark.parametrize("shape", [(0, 4), (3, 0, 4)])
def test_tensors_without_elements(shape: tuple[int, ...]) -> None:
    def forward(self: Any, x: Any) -> Any:
        y = torch.relu(self.a(x))
        return y.sum(), torch.cat([y, x]), y.reshape(-1)

    xs = [torch.randn(shape, requires_grad=True) for _ in range(3)] + [torch.randn(2, *shape[1:])]
    assert_equal(forward, xs, linear(), out="list")


def test_reductions_of_nothing() -> None:
    def forward(self: Any, x: Any) -> Any:
        y = self.a(x)
        return y.sum(0), y.prod(0), y.mean(0), torch.logsumexp(y, 0)

    assert_equal(forward, [torch.randn(n, 4) for n in (0, 2, 0)], linear(), out="list", gradients=False)


def test_one_row_and_one_feature() -> None:
    assert_equal(lambda self, x: self.a(x) + x, [torch.randn(1, requires_grad=True)] * 2, linear(1, 1))


# Memory


def test_one_tensor_in_two_instances() -> None:
    x = torch.randn(4, requires_grad=True)
    assert_equal(
        lambda self, s: self.a(s[0]) * s[1], [(x, x), (x, x.detach()), (x.detach().clone(), x)], linear()
    )


def test_views_of_one_tensor_are_instances() -> None:
    base = torch.randn(6, 4, requires_grad=True)
    assert_equal(lambda self, x: self.a(x).sum(0), [base[:2], base[1:4], base[::2], base[5:6]], linear())


def test_views_and_in_place_writes() -> None:
    def forward(self: Any, x: Any) -> Any:
        y = self.a(x)
        z = y.clone()
        row = z[0]
        row += 1
        z[:, 1] = y[:, 0] * 2
        z[1].mul_(3)
        w = z.view(-1)
        w[2] = y.sum()
        w.relu_()
        return z, row, w

    assert_equal(forward, [torch.randn(n, 4, requires_grad=True) for n in (2, 3, 2)], linear(), out="list")


def test_in_place_on_an_input_writes_nothing_into_the_instance_wrongly() -> None:
    """A write into the instance's own tensor meets no value: it happens as in the loop."""

    def forward(self: Any, x: Any) -> Any:
        x = x.clone()
        x.mul_(2)
        y = self.a(x)
        x.add_(0.5) if False else None
        return y + x

    assert_equal(forward, vectors(4, 4), linear())


def test_a_constant_written_after_it_met_a_value_is_an_error() -> None:
    def forward(self: Any, x: Any) -> Any:
        buffer = torch.zeros(4)
        y = self.a(x) + buffer
        buffer.add_(1)
        return y + buffer

    with pytest.raises(fxbatch.FxbatchError):
        model(forward, linear())(vectors(4, 4))


def test_unused_outputs() -> None:
    def forward(self: Any, x: Any) -> Any:
        h, _ = self.rnn(x)
        values, _ = torch.max(h, 0)
        self.a(x)
        return values

    xs = [torch.randn(n, 4, requires_grad=True) for n in (2, 3)]
    assert_equal(forward, xs, {**linear(), "rnn": nn.GRU(4, 3)})


@pytest.mark.parametrize("kind", ["transposed", "expanded", "strided", "flipped"])
def test_strides(kind: str) -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.a(x).t().contiguous().view(-1) + x.sum()

    def make() -> torch.Tensor:
        if kind == "transposed":
            return torch.randn(4, 3).t()
        if kind == "expanded":
            return torch.randn(1, 4).expand(3, 4)
        return torch.randn(3, 8)[:, ::2] if kind == "strided" else torch.randn(3, 4).flip(0)

    xs = [make() for _ in range(3)]
    assert_equal(forward, [x[:, :4] if x.shape[1] >= 4 else torch.randn(3, 4) for x in xs], linear())


# Indices and embeddings


def test_integer_arguments_that_are_indices() -> None:
    def forward(self: Any, sample: Any) -> Any:
        x, i = sample
        y = self.a(x)
        return y[i] + y[i - 1 : i][0] + y.select(0, i) + y.narrow(0, i, 1)[0] + y[torch.tensor(i)]

    xs = [torch.randn(5, 4, requires_grad=True) for _ in range(4)]
    made = assert_equal(forward, list(zip(xs, (1, 2, 3, 4), strict=True)), linear())
    assert fxbatch.explain(made, list(zip(xs, (1, 2, 3, 4), strict=True))).launches_after < 24


def test_indices_out_of_range_raise() -> None:
    made = model(lambda self, s: self.a(s[0])[s[1]], linear())
    with pytest.raises(IndexError):
        made([(torch.randn(2, 4), 1), (torch.randn(2, 4), 2)])


def test_a_word_out_of_range_raises() -> None:
    made = model(lambda self, w: self.e(w), {"e": nn.Embedding(3, 2)})
    with pytest.raises((IndexError, RuntimeError, fxbatch.FxbatchError)):
        made([torch.tensor(1), torch.tensor(3)])
    assert made([torch.tensor(1)]).shape == (1, 2)


@pytest.mark.parametrize("sparse", [False, True])
def test_padding_idx_and_sparse(sparse: bool) -> None:
    def forward(self: Any, words: Any) -> Any:
        return self.out(self.e(words).sum(0))

    parts = {"e": nn.Embedding(5, 4, padding_idx=1, sparse=sparse), "out": nn.Linear(4, 2)}
    words = [torch.tensor(w) for w in ([1, 2], [1, 1], [0, 4, 4], [3])]
    made = assert_equal(forward, words, parts)
    made(words).sum().backward()
    gradient = made.e.weight.grad
    assert gradient.is_sparse == sparse
    assert not gradient.to_dense()[1].any()
    look_ups = [row for row in fxbatch.explain(made, words).unbatched if row.signature.startswith("e(")]
    assert look_ups == [], "batched, the sparse gradient as well"


def test_max_norm_embedding_is_an_error_or_right() -> None:
    made = model(lambda self, w: self.e(w), {"e": nn.Embedding(4, 3, max_norm=0.5)})
    words = [torch.tensor(i) for i in (0, 1, 1)]
    reference = nn.Embedding.from_pretrained(made.e.weight.detach().clone(), freeze=False, max_norm=0.5)
    try:
        found = made(words)
    except fxbatch.FxbatchError as error:
        assert "shared" in str(error) or "instances" in str(error)
        return
    torch.testing.assert_close(found, torch.stack([reference(w) for w in words]))


# Coupling


COUPLED = {
    "mean": lambda y: y.mean(0),
    "softmax": lambda y: torch.softmax(y, 0),
    "reshape": lambda y: y.reshape(-1),
    "flatten": lambda y: y.flatten(),
    "sum of all": lambda y: y.sum(),
    "norm": lambda y: y / y.norm(),
    "cumsum": lambda y: y.cumsum(0),
    "sort": lambda y: y.sort(0).values,
    "roll": lambda y: y.roll(1),
    "flip": lambda y: y.flip(0),
    "transpose": lambda y: y.transpose(0, -1),
    "layer norm": lambda y: F.layer_norm(y, y.shape),
    "view": lambda y: y.view(-1, 2),
    "repeat": lambda y: y.repeat(2, *(1 for _ in y.shape)),
    "std": lambda y: (y - y.mean()) / (y.std() + 1),
    "argmax": lambda y: y.argmax(),
    "diff": lambda y: torch.diff(y, dim=0),
}


@pytest.mark.parametrize("name", COUPLED)
def test_what_would_mix_instances_does_not(name: str) -> None:
    xs = [torch.randn(n, 4, requires_grad=True) for n in (2, 2, 3)]
    assert_equal(lambda self, x: COUPLED[name](self.a(x)), xs, linear(), out="list")


def test_batch_norm_in_training_is_refused() -> None:
    made = model(lambda self, x: self.n(self.a(x)), {**linear(), "n": nn.BatchNorm1d(4)})
    xs = [torch.randn(3, 4) for _ in range(3)]
    with pytest.raises(fxbatch.BatchCoupledError, match=r"BatchNorm.*test_hard_cases_data\.py:\d+"):
        made(xs)
    made.eval()
    check_equal(made, xs)
    assert int(made.n.num_batches_tracked) == 0


def test_a_batch_norm_that_is_held_and_never_called_is_no_reason() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.query(x).tanh()

    made = model(lambda self, x: self.a(x).sum(), {"a": Attention()})
    check_equal(made, [torch.randn(4) for _ in range(5)])
    assert int(made.a.norm.num_batches_tracked) == 0


ERRORS = {
    "cholesky": lambda x: torch.linalg.cholesky(x * torch.eye(3)),
    "inv": lambda x: torch.linalg.inv(x * torch.eye(3)),
    "inverse": lambda x: torch.inverse(x * torch.eye(3)),
    "solve": lambda x: torch.linalg.solve(x * torch.eye(3), torch.ones(3)),
    "eigh": lambda x: torch.linalg.eigh(x.log() * torch.eye(3))[0],
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_matrix_that_has_no_factor_is_an_error_as_in_the_loop(name: str) -> None:
    """Batched it was NaN, for torch's check of each matrix gives nothing that anybody reads."""
    xs = [torch.tensor(-1.0 if i == 2 and name != "inv" else 1.0) for i in range(5)]
    if name in ("inv", "inverse", "solve"):
        xs[2] = torch.tensor(0.0)
    made = model(lambda self, x: ERRORS[name](self.g * x).sum(), {"g": nn.Parameter(torch.tensor(2.0))})
    good = [x for i, x in enumerate(xs) if i != 2]
    check_equal(made, good)
    for _ in range(2):
        with pytest.raises(torch.linalg.LinAlgError):
            made(xs)


def test_such_an_error_is_caught_by_the_forward_in_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdaptiveSwitch, "on", True)

    class Trying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g = nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return torch.linalg.cholesky(self.g * x * torch.eye(3)).sum()
            except RuntimeError:
                return self.g * x

    made, xs = Trying(), [torch.tensor(-1.0 if i == 2 else 1.0) for i in range(5)]
    batched = fxbatch.autobatch(Trying.forward)
    expected = torch.stack([made(x) for x in xs])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxbatch.LoopWarning)
        for _ in range(4):
            torch.testing.assert_close(batched(made, xs), expected)


@pytest.mark.parametrize("shape", [((4,), (3, 4)), ((3, 1), (4,)), ((1,), (2, 3, 4)), ((), (4,))])
def test_broadcasting_of_mixed_ranks(shape: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    def forward(self: Any, sample: Any) -> Any:
        x, y = sample
        u, v = torch.sin(x), self.a(y)
        return u + v, v * u, torch.maximum(u, v), torch.where(v > 0, u, v), v - self.a.bias

    pairs = [(torch.randn(shape[0], requires_grad=True), torch.randn(shape[1])) for _ in range(3)]

    def wrapped(self: Any, sample: Any) -> Any:
        return forward(self, (self.g * sample[0], sample[1]))

    assert_equal(wrapped, pairs, {**linear(), "g": nn.Parameter(torch.tensor(1.5))}, out="list")


# Types


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    def forward(self: Any, x: Any) -> Any:
        y = x * self.w
        return y * 2 + y.sum(), y @ self.w

    w = nn.Parameter(torch.randn(4).to(dtype))
    xs = vectors(4, 4, 4, dtype=dtype)
    made = assert_equal(forward, xs, {"w": w})
    assert made(xs)[0].dtype == dtype


def test_mixed_dtypes_in_one_minibatch() -> None:
    def forward(self: Any, x: Any) -> Any:
        return (x * self.w + 1).sum()

    xs = [torch.randn(4), torch.randn(4).double(), torch.arange(4), torch.tensor([True, False, True, True])]
    assert_equal(forward, xs, {"w": nn.Parameter(torch.randn(4))}, out="list")


def test_complex_gradients() -> None:
    def forward(self: Any, x: Any) -> Any:
        return torch.fft.fft(x * self.w).abs().sum() + torch.view_as_real(x * self.w).sum()

    assert_equal(forward, vectors(4, 4, dtype=torch.complex64), {"w": nn.Parameter(torch.randn(4))})


# Sizes


def test_very_wide() -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.b(torch.tanh(self.a(x)))

    made = model(forward, linear())
    xs = torch.randn(3000, 4)
    check_equal(made, xs)
    few = fxbatch.explain(made, xs[:2]).launches_after
    assert few <= 3
    assert_launches(made, xs, few)


def test_very_deep() -> None:
    def forward(self: Any, sample: Any) -> Any:
        x, n = sample
        for _ in range(n):
            x = torch.tanh(self.a(x))
        return x

    assert_equal(forward, list(zip(vectors(4, 4), (3000, 1000), strict=True)), linear())


def test_a_mask_of_one_element() -> None:
    """It makes a dimension of length one or zero; asking for its value again and again recursed for ever."""

    def forward(self: Any, x: Any) -> Any:
        y = self.a(x)
        mask = y.sum() > 0
        return torch.masked_select(y.sum(), mask).sum() + y[mask].sum(), y[None, mask].shape

    assert_equal(
        forward, [torch.full((4,), k, requires_grad=True) for k in (-2.0, 3.0, 5.0)], linear(), out="list"
    )


def test_shapes_that_pytorch_foretells_wrongly_are_an_error() -> None:
    """On fake tensors the losses of one row are [1], on real ones []; a result of the other shape is never given."""
    target = torch.tensor([2, -1, -1, -1])

    def forward(self: Any, x: Any) -> Any:
        return F.multilabel_margin_loss(self.a(x), target, reduction="none")

    with pytest.raises(fxbatch.TraceError, match=r"multilabel_margin_loss: output 0 is .*\[\], but .*\[1\]"):
        model(forward, linear())(vectors(4, 4))
    assert_equal(lambda self, x: F.multilabel_margin_loss(self.a(x), target), vectors(4, 4), linear())


def test_lengths_that_do_not_add_up_are_an_error() -> None:
    def forward(self: Any, sample: Any) -> Any:
        x, lengths = sample
        return torch.segment_reduce(self.a(x), "sum", lengths=lengths)

    good = [(torch.randn(5, 4), torch.tensor(n)) for n in ([2, 3], [0, 5])]
    made = assert_equal(forward, good, linear())
    bad = [*good, (torch.randn(5, 4), torch.tensor([2, 2]))]
    with pytest.raises(RuntimeError, match="Expected all rows of lengths along axis to sum"):
        made(bad)
    check_equal(made, good)


def test_mixed_random_minibatches() -> None:
    """Every hard thing at once, sixty times: other structures, other lengths, other constants."""
    rng = random.Random(3)

    def forward(self: Any, plan: Any) -> Any:
        values = [self.a(plan["x"])]
        for op, i, j, c in plan["steps"]:
            a, b = values[i % len(values)], values[j % len(values)]
            values.append({0: a + b * c, 1: torch.tanh(a) - c, 2: self.b(a), 3: a.roll(int(c * 10))}[op])
        return values[-1] + values[len(values) // 2]

    made = model(forward, linear())
    for size in (1, 2, 5, 9):
        plans = [
            {
                "x": torch.randn(4),
                "steps": [
                    (rng.randrange(4), rng.randrange(9), rng.randrange(9), rng.choice([0.1, 0.2, 0.3]))
                    for _ in range(rng.randrange(12))
                ],
            }
            for _ in range(size)
        ]
        check_equal(made, plans)
