"""C reads and writes plain memory only: nested decorated models, fake, functional, wrapped and freed tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxbatch
from fxbatch.codegen.native import address
from fxbatch.errors import GradientError, TraceError
from fxbatch.torch_private import FakeTensorMode
from tests.oracle import check_equal

XS = [[torch.randn(6) for _ in range(k)] for k in (2, 3, 2)]


class Encoder(nn.Module):
    """Decorated itself: used alone and inside another decorated model."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 6)

    @fxbatch.autobatch
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l(x).relu()


def model(**options: Any) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder()
            self.out = nn.Linear(6, 2)

        @fxbatch.autobatch(**options)
        def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
            return self.out(self.encoder(xs).sum(0))

    torch.manual_seed(0)
    return Model()


@pytest.fixture(scope="module")
def warm() -> nn.Module:
    """A model that has run forwards and backwards."""
    m = model()
    m(XS).sum().backward()
    return m


@pytest.mark.parametrize("options", [{}, {"backward": "autograd"}, {"mode": "unrolled"}], ids=str)
def test_a_decorated_module_that_was_used_alone_may_be_used_inside_another(options: dict[str, Any]) -> None:
    m = model(**options)
    alone = m.encoder(torch.randn(32, 6))  # held, so that its memory isn't used again
    check_equal(m, XS)
    assert alone.shape == (32, 6)
    with fxbatch.disabled():
        expected = m.encoder(torch.ones(3, 6))
    torch.testing.assert_close(m.encoder(torch.ones(3, 6)), expected)


def test_an_operation_that_calls_a_decorated_function_runs_its_plain_code() -> None:
    inner = fxbatch.autobatch(lambda x, w: torch.tanh(x * w), shared=("w",))

    @fxbatch.operation
    def body(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return inner(x, w)  # of the rows of x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        @fxbatch.autobatch
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return body(x, self.w)

    inner(torch.randn(64, 3), torch.ones(3))
    check_equal(Model(), [torch.randn(2, 3) for _ in range(3)])


def test_inner_engines_learn_nothing_from_bodies_that_run_call_by_call() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.encoder([x, x])
            return found[0].index_put((torch.tensor([0]),), x.new_zeros(1), accumulate=True).nan_to_num()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = Odd()

        @fxbatch.autobatch
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.odd(x)

    m = Model()
    m.odd.encoder(torch.randn(3, 6))
    (engine,) = m.odd.encoder.__dict__["_fxbatch_engines"].values()
    known = len(engine.table.modules)
    check_equal(m, [torch.randn(6) for _ in range(3)])
    assert len(engine.table.modules) == known, "bodies run on copies of modules, which would be kept for ever"


@pytest.mark.parametrize("cold", [False, True])
def test_under_fake_tensors_a_model_is_a_plain_loop(warm: nn.Module, cold: bool) -> None:
    m = model() if cold else warm
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = m(XS)
        fakes = m([[mode.from_tensor(x) for x in xs] for xs in XS])
    assert found.shape == fakes.shape == (3, 2)
    assert type(found).__name__ == "FakeTensor"
    with fxbatch.disabled():
        expected = warm(XS)
    torch.testing.assert_close(warm(XS), expected)


def test_a_graph_that_is_traced_through_a_model_computes_what_the_model_does(warm: nn.Module) -> None:
    stacked = [torch.stack(xs) for xs in XS]
    graph = make_fx(lambda *xs: warm([list(x) for x in xs]))(*stacked)
    other = [x + 1 for x in stacked]
    with fxbatch.disabled():
        expected = warm([list(x) for x in other])
    torch.testing.assert_close(graph(*other), expected)


def test_lazy_blocks_say_that_they_need_real_tensors(warm: nn.Module) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(TraceError, match="real tensors"):
        fxbatch.lazy(warm).__enter__()


@pytest.mark.parametrize("cold", [False, True])
def test_memory_is_where_the_model_is_whatever_device_is_the_default(warm: nn.Module, cold: bool) -> None:
    m = model() if cold else warm
    with torch.device("meta"):
        found = m(XS)
        found.sum().backward()
    assert found.device.type == "cpu"
    assert all(p.grad is not None and p.grad.device.type == "cpu" for p in m.parameters())
    with fxbatch.disabled():
        torch.testing.assert_close(found, m(XS))


def test_gradients_of_a_batch_of_gradients_are_refused_by_name(warm: nn.Module) -> None:
    out = warm(XS)
    with pytest.raises(GradientError, match="is_grads_batched"):
        torch.autograd.grad(out, warm.out.weight, torch.randn(4, 3, 2), is_grads_batched=True)


def test_gradients_without_plain_memory_are_read_as_what_they_are(warm: nn.Module) -> None:
    grads = {
        "zero": torch._efficientzerotensor(3, 2),
        "negated": torch.randn(3, 2, dtype=torch.complex64).conj().imag,
        "expanded": torch.ones(1).expand(3, 2),
    }
    for grad in grads.values():
        (found,) = torch.autograd.grad(warm(XS), warm.out.weight, grad)
        with fxbatch.disabled():
            (expected,) = torch.autograd.grad(warm(XS), warm.out.weight, grad)
        torch.testing.assert_close(found, expected)


def not_plain() -> dict[str, torch.Tensor]:
    freed, short = torch.randn(5)[2:], torch.randn(5)[2:]
    freed.untyped_storage().resize_(0)
    short.untyped_storage().resize_(12)
    with FakeTensorMode():
        fake = torch.empty(3)
    return {
        "fake": fake,
        "meta": torch.empty(3, device="meta"),
        "functional": torch._to_functional_tensor(torch.randn(3)),
        "zeros without memory": torch._efficientzerotensor(3),
        "freed": freed,
        "shorter than its shape": short,
        "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "mkldnn": torch.randn(3).to_mkldnn(),
    }


@pytest.mark.parametrize("name", not_plain())
def test_the_gate_shows_c_no_memory_that_is_not_plain(name: str) -> None:
    assert address(not_plain()[name], 12) is None


def test_the_gate_shows_c_nothing_that_a_transform_wraps() -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(address(x, 12))
        return x.sum()

    torch.vmap(look)(torch.randn(2, 3))
    torch.func.grad(look)(torch.randn(3))
    torch.func.functionalize(look)(torch.randn(3))
    torch.func.jvp(look, (torch.randn(3),), (torch.ones(3),))
    assert seen == [None] * 4


def test_the_gate_shows_plain_memory() -> None:
    base = torch.randn(5)
    assert address(base[2:], 12) == base.data_ptr() + 8
    assert address(nn.Parameter(base), 20) == base.data_ptr()
    assert address(base, 24) is None, "more than there is"
    assert address(base[:0], 0) == 0
