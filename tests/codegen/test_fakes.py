"""Fake tensors of fixed sizes say what torch's say, and cuts are networkx's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fxbatch.codegen.partition import minimum_cut
from fxbatch.torch_fakes import FakeMode
from fxbatch.torch_private import FakeTensorMode, tree_leaves

A, B = torch.randn(4, 6), torch.randn(6)
IMAGE, INDEX = torch.randn(2, 3, 8, 8), torch.tensor([2, 0])

CALLS: dict[str, Callable[[], Any]] = {
    "pointwise": lambda: torch.tanh(A) * B + 2,
    "promotion": lambda: (A > 0) * torch.arange(6) + 1.5,
    "views": lambda: (A.t()[1:3], A[:, -1], A.view(2, 12), A[0].expand(3, 6), A.unsqueeze(0), A.detach()),
    "products": lambda: (
        A @ B,
        F.linear(A, torch.ones(5, 6), torch.ones(5)),
        torch.einsum("ij,kj->ik", A, A),
    ),
    "reductions": lambda: (
        A.sum(),
        A.mean(1, keepdim=True),
        A.argmax(-1),
        A.var(0),
        A.max(1),
        A.logsumexp(0),
    ),
    "indexing": lambda: (A[INDEX], A[:, INDEX], A.gather(1, torch.zeros(4, 1).long()), F.embedding(INDEX, A)),
    "a mask": lambda: A[A > 0],
    "a number": lambda: A.sum().item(),
    "a number of a constant": lambda: torch.tensor(3.0).item(),
    "constants": lambda: (A * torch.tensor(3.0), torch.tensor([1, 2]) + INDEX),
    "made": lambda: (torch.zeros_like(A), A.new_ones(3), torch.full((2,), 1.0), torch.empty_like(A.t())),
    "joined": lambda: (
        torch.cat([A, A.t().reshape(4, 6)]),
        torch.stack([B, B], -1),
        A.split(2),
        A.chunk(4, 1),
    ),
    "normalized": lambda: (
        F.layer_norm(A, (6,)),
        F.softmax(A, -1),
        F.batch_norm(A, None, None, training=True),
    ),
    "losses": lambda: (F.cross_entropy(A, torch.zeros(4).long()), F.mse_loss(A, A * 2), F.gelu(A)),
    "random": lambda: (F.dropout(A, 0.5), torch.rand(3), torch.bernoulli(A.sigmoid())),
    "convolutions": lambda: (F.conv2d(IMAGE, torch.ones(5, 3, 3, 3)), F.max_pool2d(IMAGE, 2)),
    "casts": lambda: (A.double(), A.to(torch.int32), A.bfloat16().float(), A.to("cpu")),
    "complex": lambda: (torch.fft.fft(A), torch.complex(B, B).conj()),
    "linear algebra": lambda: (torch.linalg.svd(A), torch.linalg.qr(A), torch.linalg.inv(A @ A.t())),
    "sorted": lambda: (A.sort(-1), A.topk(2), A.cumsum(0), torch.unique(INDEX)),
    "written": lambda: (
        A.clone().add_(1),
        A.clone().masked_fill_(A > 0, 0),
        A.clone().copy_(B),
        A.clone().t_(),
    ),
    "put": lambda: (
        A.clone().index_put_((INDEX,), B),
        A.clone().scatter_(0, INDEX[None], 1.0),
        A.clone().squeeze_(),
    ),
    "wrong sizes": lambda: A + torch.ones(5),
    "wrong types": lambda: F.linear(A, torch.ones(5, 6).long()),
}


@pytest.mark.parametrize("name", CALLS)
def test_fakes_are_torchs(name: str) -> None:
    def told(mode: FakeTensorMode) -> Any:
        """Forms of what the calls give, and what they share, with fakes in place of the tensors above."""
        names = ("A", "B", "IMAGE", "INDEX")
        real = {x: globals()[x] for x in names}
        fakes = {x: mode.from_tensor(real[x]) for x in names}
        globals().update(fakes)
        try:
            with mode:
                found = tree_leaves(CALLS[name]())
        except Exception as error:  # noqa: BLE001  # the same one is wanted
            return type(error), str(error)
        finally:
            globals().update(real)
        of = [x.untyped_storage()._cdata for x in fakes.values()]
        return [
            (x.shape, x.stride(), x.dtype, x.device, x.storage_offset(), x.untyped_storage()._cdata in of)
            if isinstance(x, torch.Tensor)
            else x
            for x in found
        ]

    assert told(FakeMode()) == told(FakeTensorMode())


def test_norms_keep_what_their_kernels_keep() -> None:
    """On the CPU statistics have the type of the weights, where autocast makes x another; by torch's fakes, of x."""
    x, w, aten = A.bfloat16(), torch.ones(6), torch.ops.aten
    norms: list[Callable[..., Any]] = [
        lambda x, w: aten.native_layer_norm(x, [6], w, w, 1e-5),
        lambda x, w: aten.native_group_norm(x[..., None], w, w, 4, 6, 1, 2, 1e-5),
    ]
    for norm in norms:
        with FakeMode() as mode:
            found = norm(mode.from_tensor(x), mode.from_tensor(w))
        assert [(y.dtype, y.shape) for y in found] == [(y.dtype, y.shape) for y in norm(x, w)]


@pytest.mark.filterwarnings("ignore:An output with one or more elements")
def test_writing_what_does_not_fit_is_an_error() -> None:
    """As kernels say it; torch's fakes become as large as what is written."""
    with FakeMode(), pytest.raises(RuntimeError, match=r"output with shape \[5, 1\] doesn't match"):
        torch.empty(5, 1).clamp_(max=torch.empty(5, 5))


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.sampled_from([0, 1, 2, 3, 50, 1 << 100]))))
def test_cuts_are_the_minimum_nearest_to_the_sink(edges: list[tuple[int, int, int]]) -> None:
    flow: Any = {a: {} for a in range(8)}
    graph: Any = nx.DiGraph()
    graph.add_nodes_from(flow)
    for a, b, capacity in edges:
        if a != b and b != 0 and a != 7:
            flow[a][b] = capacity
            graph.add_edge(a, b, capacity=capacity if capacity < 1 << 100 else float("inf"))
    try:
        _, (_, behind) = nx.minimum_cut(graph, 0, 7)
    except nx.NetworkXUnbounded:
        behind = None
    assert minimum_cut(flow, 0, 7) == behind
