"""Recordings against the plain forward: modules, torch functions, numbers, indices, in-place writes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxbatch.trace.table import SignatureTable
from tests.trace.oracle import check_equal, recorded


@dataclass
class Tree:
    word: torch.Tensor | None = None
    left: Any = None
    right: Any = None


def tree(leaves: int, generator: random.Random) -> Tree:
    if leaves == 1:
        return Tree(word=torch.tensor(generator.randrange(20)))
    k = generator.randrange(1, leaves)
    return Tree(left=tree(k, generator), right=tree(leaves - k, generator))


class Cell(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * d, 5 * d)

    def forward(self, h1: Any, c1: Any, h2: Any, c2: Any) -> Any:
        i, f1, f2, o, g = self.gates(torch.cat([h1, h2], -1)).chunk(5, -1)
        c = i.sigmoid() * g.tanh() + f1.sigmoid() * c1 + f2.sigmoid() * c2
        return o.sigmoid() * c.tanh(), c


class TreeLSTM(nn.Module):
    def __init__(self, d: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, d)
        self.leaf = nn.Sequential(nn.Linear(d, 2 * d), nn.Tanh())
        self.cell = Cell(d)
        self.out = nn.Linear(d, 3)

    def encode(self, t: Tree) -> Any:
        if t.word is not None:
            return self.leaf(self.embed(t.word)).chunk(2)
        return self.cell(*self.encode(t.left), *self.encode(t.right))

    def forward(self, t: Tree) -> Any:
        return self.out(self.encode(t)[0])


@pytest.mark.parametrize("sizes", [[], [1], [2], [1, 5, 3, 9]])
def test_tree_lstm(sizes: list[int]) -> None:
    model = TreeLSTM()
    trees = [tree(n, random.Random(n)) for n in sizes]
    _, execution = check_equal(model.forward, trees, list(model.parameters()) if sizes else [])
    assert all(
        s.operation.kind == "constant" or s.name in ("embed", "leaf", "chunk", "cell", "out")
        for p in execution.programs
        for s in p.signatures
    )


def test_two_minibatches_share_signatures() -> None:
    model, table = TreeLSTM(), SignatureTable()
    check_equal(model.forward, [tree(4, random.Random(0))], table=table)
    n = len(table)
    check_equal(model.forward, [tree(7, random.Random(1)), tree(2, random.Random(2))], table=table)
    assert len(table) == n


def test_class_call_is_patched_only_while_tracing() -> None:
    before = nn.Module.__call__
    seen = []

    def fn(x: torch.Tensor) -> Any:
        seen.append(nn.Module.__call__ is before)
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop") as caught:
        recorded(fn, [torch.ones(2)])
    assert seen == [False]
    assert nn.Module.__call__ is before
    assert "instance 0" in caught.value.__notes__[-1]


X = [torch.randn(4, 5, generator=torch.Generator().manual_seed(k)) for k in range(3)]
LIN = nn.Linear(5, 5)

FUNCTIONS = {
    "arithmetic": lambda x: (LIN(x) + 1) * 2.5 - LIN(x) / 3 + (1 - x) ** 2 + 2 / (x + 10) + x // 2 + x % 3,
    "reverse": lambda x: 2 ** LIN(x) - (7 % (LIN(x).abs() + 1)),
    "matmul": lambda x: (LIN(x) @ LIN.weight, x @ LIN(x).t()),
    "real left": lambda x: x * LIN(x) + torch.ones(5) * LIN(x),
    "cat": lambda x: torch.cat([LIN(x), x, LIN(x)], dim=1),
    "stack": lambda x: torch.stack((LIN(x), LIN(x)), 0).sum(0),
    "methods": lambda x: LIN(x).relu().softmax(-1).log().mean(dim=1, keepdim=True).exp(),
    "unbind": lambda x: [r.sum() for r in LIN(x)],
    "unpack": lambda x: (lambda a, b, c, d: a * b + c - d)(*LIN(x)),
    "topk": lambda x: LIN(x).topk(2, dim=-1),
    "split": lambda x: LIN(x).split([2, 3], dim=1),
    "max": lambda x: LIN(x).max(dim=0),
    "max one": lambda x: LIN(x).max(),
    "index": lambda x: LIN(x)[0] + LIN(x)[-1] + LIN(x)[1, 2] + LIN(x)[:, 1].sum() + LIN(x)[1:3].sum(0),
    "ellipsis": lambda x: LIN(x)[..., None].squeeze(-1)[None],
    "advanced": lambda x: LIN(x)[[0, 2]] + LIN(x)[torch.tensor([1, 3])],
    "T": lambda x: LIN(x).T + LIN(x).mT,
    "shape": lambda x: LIN(x).view(LIN(x).shape[0] * LIN(x).size(1)).reshape(2, -1),
    "einsum": lambda x: torch.einsum("ij,kj->ik", LIN(x), x),
    "functional": lambda x: F.layer_norm(F.gelu(LIN(x)), (5,)),
    "compare": lambda x: (LIN(x) > 0, LIN(x) == LIN(x), LIN(x) <= x),
    "where": lambda x: torch.where(LIN(x) > 0, LIN(x), torch.zeros(())),
    "kwargs": lambda x: torch.sum(input=LIN(x), dim=0, keepdim=True),
    "dict": lambda x: {"a": LIN(x), "b": [LIN(x), {"c": 3}]},
    "bool": lambda x: (LIN(x) > 0) & (x > 0) | ~(x > 0),
    "int": lambda x: LIN(x).argmax(-1) * 2 + 1,
    "int float": lambda x: LIN(x).argmax(-1) * 2.5,
    "detach": lambda x: LIN(x).detach() * LIN(x),
    "no grad": lambda x: _no_grad(x),
    "new": lambda x: LIN(x) + LIN(x).new_ones(5) + torch.zeros_like(LIN(x)),
    "len": lambda x: LIN(x) * len(LIN(x)) * LIN(x).dim() * LIN(x).numel(),
    "where scalar": lambda x: torch.where(x > 0, LIN(x), 0.0),
    "cross entropy": lambda x: F.cross_entropy(LIN(x), torch.tensor([0, 1, 2, 3])),
    "masked": lambda x: LIN(x).masked_fill(x > 0, -1.0),
    "pad": lambda x: F.pad(LIN(x), (1, 2)),
    "std": lambda x: torch.std_mean(LIN(x), dim=1),
    "linalg": lambda x: torch.linalg.norm(LIN(x)),
    "getitem value": lambda x: LIN(x)[LIN(x).argmax(0)],
    "getitem scalar value": lambda x: LIN(x)[LIN(x).sum(1).argmax()] + LIN(x)[LIN(x).sum(1).argmin() - 4],
    "shared by value": lambda x: LIN.weight[LIN(x).sum(1).argmax()],
    "mask": lambda x: LIN(x)[x > 0].sum() + LIN(x)[LIN(x) > 0],
    "masked_select": lambda x: torch.masked_select(LIN(x), LIN(x) > 0) * 2,
    "nonzero": lambda x: (LIN(x) > 0).nonzero(),
    "unique": lambda x: torch.unique((LIN(x) > 0).long()),
    "repeat_interleave": lambda x: LIN(x).repeat_interleave((LIN(x)[:, 0] > 0).long() + 1, 0),
    "equal": lambda x: torch.equal(LIN(x), LIN(x)),
    "in": lambda x: 3.0 in LIN(x),
    "branch": lambda x: LIN(x) * 2 if LIN(x).sum() > 0 else LIN(x) - 1,
    "item": lambda x: LIN(x).sum().item() + float(x.sum()),
    "tolist": lambda x: LIN(x).argmax(-1).tolist(),
    "int of": lambda x: LIN(x)[int(LIN(x).sum(1).argmax())],
    "range": lambda x: sum(LIN(x)[i] for i in range(LIN(x).argmax(0)[0] + 1)),
    "tensor of": lambda x: torch.tensor([LIN(x).detach().sum(), 2.0]),
    "iadd": lambda x: _iadd(x),
    "setitem": lambda x: _setitem(x),
    "view write": lambda x: _view_write(x),
    "write rows": lambda x: _write_rows(x),
    "relu_": lambda x: _relu_(x),
    "lstm": lambda x: RNNS[0](LIN(x)),
    "gru cell": lambda x: RNNS[1](LIN(x)),
    "mha": lambda x: RNNS[2](LIN(x), x, LIN(x)),
    "custom": lambda x: Double.apply(LIN(x)),
    "format": lambda x: f"{LIN(x).sum():.3f}",
    "numpy": lambda x: LIN(x).detach().numpy().sum().item(),
    "any": lambda x: 1 if (LIN(x) > 100).any() else 2,
    "sorted": lambda x: sorted(LIN(x).sum(1), key=lambda v: v.item())[0],
    "dropout eval": lambda x: F.dropout(LIN(x), 0.5, training=False) + 1,
    "inplace dropout": lambda x: nn.Dropout(inplace=True).eval()(LIN(x)),
    "relu module": lambda x: nn.ReLU(inplace=True)(LIN(x)) + 1,
    "out of data": lambda x: LIN(x).data * 2,
    "chain": lambda x: LIN(x).unsqueeze(0).expand(3, -1, -1).permute(2, 0, 1).contiguous(),
    "requires grad": lambda x: (
        LIN(x).requires_grad,
        LIN(x).detach().requires_grad,
        (LIN(x) > 0).requires_grad,
    ),
    "list of": lambda x: torch.cat(list(LIN(x))),
    "pad_sequence": lambda x: nn.utils.rnn.pad_sequence([LIN(x), LIN(x)[:2]], batch_first=True),
    "add_": lambda x: LIN(x).add_(x, alpha=2).mul_(3),
    "fill_": lambda x: LIN(x).fill_(2.0),
    "unsqueeze_": lambda x: LIN(x).unsqueeze_(0),
    "isinstance": lambda x: (
        isinstance(LIN(x), torch.Tensor),
        torch.is_tensor(LIN(x)),
        LIN(x).is_floating_point(),
    ),
    "frozen bool": lambda x: LIN(x) * True,
    "complex": lambda x: torch.view_as_real(torch.fft.fft(LIN(x))),
    "type": lambda x: LIN(x).double().to(torch.float32).int(),
    "reversed": lambda x: list(reversed(LIN(x))),
    "sum list": lambda x: sum([LIN(x), LIN(x)]),
    "abs": lambda x: abs(-LIN(x)),
    "round": lambda x: LIN(x).round(decimals=1),
    "gather": lambda x: LIN(x).gather(1, LIN(x).argsort(1)),
    "logsumexp": lambda x: LIN(x).logsumexp(-1).cumsum(0),
    "full_like": lambda x: torch.full((2,), LIN(x).detach().sum()),
}


def _no_grad(x: Any) -> Any:
    with torch.no_grad():
        y = LIN(x) * 2
        if y.sum() > 0:
            y = y + LIN(x)
    return y, LIN(x)


def _iadd(x: Any) -> Any:
    y = LIN(x)
    z = y
    y += 1
    y *= x
    y -= LIN(x)
    return y, z


def _setitem(x: Any) -> Any:
    y = LIN(x) * 1
    y[0] = x[1]
    y[1, 2] = 5.0
    y[2:] = LIN(x)[2:] * 2
    y[:, 0] = 0
    y[0] += 1
    return y


def _view_write(x: Any) -> Any:
    y = LIN(x) * 1
    row, flat, part = y[1], y.view(-1), y[:, 2:4]
    row.add_(1)
    part[0] = 7
    flat.mul_(2)
    row += 3
    return y, row, flat, part, part[0]


def _write_rows(x: Any) -> Any:
    y = LIN(x).new_zeros(4, 5)
    for i in range(4):
        y[i] = LIN(x)[i] * i
    return y


def _relu_(x: Any) -> Any:
    y = LIN(x)
    z = F.relu(y, inplace=True)
    torch.relu_(z)
    z.clamp_(max=0.5)
    return y, z, y is z


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g * 2


RNNS = nn.ModuleList([nn.LSTM(5, 3, bidirectional=True), nn.GRUCell(5, 5), nn.MultiheadAttention(5, 1)])


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_function(name: str) -> None:
    check_equal(FUNCTIONS[name], X, list(LIN.parameters()) if name not in _NO_GRADIENT else [])


_NO_GRADIENT = (
    "compare",
    "bool",
    "int",
    "int float",
    "nonzero",
    "unique",
    "equal",
    "in",
    "item",
    "tolist",
    "tensor of",
    "format",
    "numpy",
    "any",
    "relu_",
    "reverse",
    "range",
    "out of data",
    "fill_",
    "isinstance",
    "requires grad",
    "shared by value",
    "type",
    "full_like",
)
