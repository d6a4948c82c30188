"""Odd one-line forwards, one a line: what people write in the forward of ONE instance.

`m` is the module (see `Parts`), `x` the instance, a vector of four numbers that wants a gradient. Lines are
expressions; `#` begins a comment. What keeps state, draws random numbers or changes the module is in states.py.
"""

from __future__ import annotations

import collections  # noqa: F401  # as what follows: the lines read it
import contextlib  # noqa: F401
import dataclasses
import enum
import functools  # noqa: F401
import itertools  # noqa: F401
import math  # noqa: F401
import operator  # noqa: F401
from collections.abc import Callable
from typing import Any

import numpy as np  # noqa: F401
import torch
from torch import nn
from torch.nn import functional as F  # noqa: F401


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any


class Which(enum.IntEnum):
    FIRST, SECOND = 0, 1


class Mode(enum.Enum):
    PLAIN, TWICE = "plain", "twice"


class Count(int):
    """A number with a name."""


class Config:
    """Plain settings that a forward reads."""

    scale, deep = 0.5, {"bias": 1.5, "steps": [1, 2]}


class Scaled(nn.Module):
    """A submodule that reads attributes of its own, and takes several kinds of arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.config = nn.Linear(4, 4), 0.5, Config()

    def forward(self, x: Any, *more: Any, times: int = 1, extra: Any = None) -> Any:
        y = self.inner(x) * self.scale * times + self.config.deep["bias"]
        for other in more:
            y = y + other
        return y if extra is None else y * extra["gain"]

    def twice(self, x: Any) -> Any:
        return self(self(x))


class Parts(nn.Module):
    """The modules that all forwards share."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.k, self.o = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.e, self.ln, self.gru, self.lstm = (
            nn.Embedding(10, 4),
            nn.LayerNorm(4),
            nn.GRUCell(4, 4),
            nn.LSTMCell(4, 4),
        )
        self.conv, self.bil, self.prelu = nn.Conv1d(1, 2, 3, padding=1), nn.Bilinear(4, 4, 3), nn.PReLU()
        self.seq = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.ml = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.md = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Identity()})
        self.p, self.pl = nn.Parameter(torch.randn(4)), nn.ParameterList([torch.randn(4), torch.randn(4)])
        self.b = nn.Buffer(torch.randn(4))
        self.s, self.rnn, self.att = Scaled(), nn.GRU(4, 3, batch_first=True), nn.MultiheadAttention(4, 2)
        self.drop, self.gn, self.bag = nn.Dropout(0.0), nn.GroupNorm(2, 4), nn.EmbeddingBag(10, 4)
        self.config, self.number, self.names = Config(), 3, ["a", "b"]


def helper(y: Any, *rest: Any, gain: float = 2.0, **named: Any) -> Any:
    """A plain function of the user's."""
    return sum(rest, start=y * gain) + sum(named.values())


def recurse(m: Any, y: Any, depth: int) -> Any:
    """A forward that calls itself."""
    return y if not depth else torch.tanh(m.l(recurse(m, y, depth - 1)))


def written(y: Any, index: Any, value: Any) -> Any:
    """`y[index] = value` on a copy of one's own."""
    made = y.clone()
    made[index] = value
    return made


def generated(y: Any, n: int) -> Any:
    """A generator of the user's."""
    for i in range(n):
        yield y * i


def tried(
    do: Callable[[], Any], otherwise: Callable[[], Any], kinds: Any = (ValueError, IndexError, RuntimeError)
) -> Any:
    """try and except, as an expression."""
    try:
        return do()
    except kinds:
        return otherwise()


def within(context: Any, do: Callable[[], Any]) -> Any:
    """with, as an expression."""
    with context:
        return do()


def repeated(y: Any, step: Callable[[Any], Any], until: Callable[[Any], Any], most: int = 5) -> Any:
    """A loop that ends by a value."""
    for _ in range(most):
        if until(y):
            return y
        y = step(y)
    return y


UNARY = """abs neg exp sin cos tanh sigmoid relu square sqrt_abs log1p_abs erf floor ceil round sign trunc frac softplus
silu gelu elu selu celu leaky_relu hardtanh hardsigmoid hardswish mish logsigmoid softsign tanhshrink softshrink relu6
expm1 atan asinh rsqrt_abs reciprocal_far nan_to_num logit_sigmoid"""
_SPECIAL = {
    "sqrt_abs": "(y.abs() + 1).sqrt()", "log1p_abs": "y.abs().log1p()", "rsqrt_abs": "(y.abs() + 1).rsqrt()",
    "reciprocal_far": "(y.abs() + 1).reciprocal()", "logit_sigmoid": "torch.logit(torch.sigmoid(y))",
}  # fmt: skip

REDUCTIONS = """sum mean prod amax amin norm logsumexp(0) cumsum(0) cumprod(0) std var softmax(-1) log_softmax(0)
argmax argmin median max min sort()[0] sort()[1] topk(2)[0] topk(2).indices flip(0) roll(1) unsqueeze(0) unsqueeze(-1) view(2,2)
reshape(-1) reshape(2,-1) expand(3,4) repeat(2) chunk(2)[1] split(3)[0] split([1,3])[1] unbind(0)[2] narrow(0,1,2)
select(0,1) diag() triu_of outer_of t() view(2,2).t() view(2,2).mT view(4,1).squeeze(-1) diff() cummax(0)[0]
clamp(-0.1,0.1) clamp(min=0) clamp_min(0.1) to(torch.float64).float()
double().float() half().float() contiguous() clone() detach()
type(torch.float64).float() long() bool() int().float() isnan() sum(0,keepdim=True) mean(-1,keepdim=True)
numel() size(0) dim()
shape[0] tile(2) flatten() ravel() swapaxes(0,0) view(2,2).permute(1,0) view(2,2).transpose(0,1) unfold(0,2,1)
masked_fill(y_gt,0.) masked_fill(y_gt,-1e9).softmax(0) where_gt index_select_02 gather_10 scatter_add_10 abs().max() aminmax()[1]
quantile(0.5) renorm_of view(2,2).trace() view(2,2).sum(1) var_mean() count_nonzero() any() all() tolist() item_sum"""  # noqa: E501
_REDUCED = {
    "triu_of": "y.view(2,2).triu()",
    "outer_of": "torch.outer(y, y)",
    "masked_fill(y_gt,0.)": "y.masked_fill(y > 0, 0.)",
    "masked_fill(y_gt,-1e9).softmax(0)": "y.masked_fill(y > 0.3, -1e9).softmax(0)",
    "where_gt": "torch.where(y > 0, y, y * 0.1)",
    "index_select_02": "y.index_select(0, torch.tensor([0, 2]))",
    "gather_10": "y.gather(0, torch.tensor([1, 0]))",
    "scatter_add_10": "y.scatter_add(0, torch.tensor([1, 0]), y[:2])",
    "var_mean()": "torch.var_mean(y)",
    "renorm_of": "y.view(2,2).renorm(2, 0, 1.0)",
    "item_sum": "y.sum().item() * y",
    "tolist()": "sum(y.tolist()) * y",
    "numel()": "y * y.numel()",
    "size(0)": "y * y.size(0)",
    "dim()": "y * y.dim()",
    "shape[0]": "y * y.shape[0]",
    "any()": "(y > 0).any()",
    "all()": "(y > -9).all()",
    "norm": "y.norm()",
    "median": "y.median()",
}
if torch.__version__ < "2.12":  # aminmax has no derivative
    _REDUCED["aminmax()[1]"] = "y.detach().aminmax()[1] + y"

LINES = """
# operators and numbers
m.l(x) + m.k(x)
m.l(x) - 1
1 - m.l(x)
2 / (m.l(x).abs() + 1)
m.l(x) ** 2
2 ** m.l(x)
m.l(x) ** 0.5 if bool((m.l(x) > 0).all()) else m.l(x)
m.l(x).detach() // 0.3
m.l(x) % 0.7
-m.l(x)
+m.l(x)
abs(m.l(x))
m.l(x) @ m.k(x)
m.l.weight @ x
x @ m.l.weight
m.l.weight @ m.l(x) + m.l.bias
m.p * x
m.b * m.l(x)
x * m.p + m.b
m.l(x) * True
m.l(x) * np.float32(0.5)
m.l(x) * np.float64(0.5)
np.float32(2.0) * m.l(x)
m.l(x) * math.pi
m.l(x) + np.arange(4).tolist()[2]
m.l(x) * torch.tensor(2.0)
torch.tensor([1.0, 2.0, 3.0, 4.0]) * m.l(x)
m.l(x) + torch.from_numpy(np.ones(4, dtype=np.float32))
m.l(x) * torch.ones(4).requires_grad_(False)
m.l(x) > 0
(m.l(x) > 0) & (m.k(x) > 0)
~(m.l(x) > 0)
(m.l(x) > 0).float() * m.k(x)
(m.l(x) == m.l(x)).all()
m.l(x).eq(0).logical_not()
torch.equal(m.l(x), m.l(x)) * x
round(3.7) * m.l(x)
sum([m.l(x), m.k(x)])
sum(m.l(x))
max(m.l(x).tolist()) * x
max(m.l(x), m.k(x), key=lambda v: v.sum().item())
min([m.l(x), m.k(x)], key=lambda v: float(v[0]))
sorted(m.l(x).tolist())[0] * x
sorted([m.l(x), m.k(x), x], key=lambda v: v.sum().item())[1]
math.exp(m.l(x).sum().item()) * x
math.sqrt(abs(float(m.l(x)[0]))) * x
int(m.l(x).argmax()) * x
m.l(x)[int(m.l(x).argmax())]
m.l(x)[m.l(x).argmax()]
# indexing
m.l(x)[0]
m.l(x)[-1]
m.l(x)[1:3]
m.l(x)[::2]
m.l(x)[[0, 2]]
m.l(x)[None]
m.l(x)[..., 0]
m.l(x)[:, None]
m.l(x)[torch.tensor([3, 1])]
m.l(x)[torch.tensor(2)]
m.l(x)[x.argmax()]
m.l(x)[m.l(x) > 0].sum()
m.l(x).view(2, 2)[1, 0]
m.l(x).view(2, 2)[:, 1]
m.l.weight[0] * x
m.l.weight[:, 1] + x
m.e.weight[3] * x
m.e(torch.tensor(3))
m.e(torch.tensor([1, 2])).sum(0)
m.e(m.l(x).argmax())
m.e.weight[m.l(x).argmax()]
m.e(torch.arange(3)) @ m.l(x)
m.e(x.argmax() + 5)
m.bag(torch.tensor([[1, 2]]))
F.embedding(torch.tensor([1]), m.e.weight)
F.one_hot(m.l(x).argmax(), 4) * x
torch.take(m.l(x), torch.tensor([0, 3]))
torch.index_add(m.l(x), 0, torch.tensor([0, 0]), m.k(x)[:2])
# writes into one's own
written(m.l(x), 0, 1.0)
written(m.l(x), slice(0, 2), m.k(x)[:2])
written(m.l(x), torch.tensor([1, 3]), 0.0)
written(m.l(x), m.l(x) > 0, 0.0)
written(x, 1, 2.0)
written(torch.zeros(4), 2, m.l(x)[2])
m.l(x).clone().add_(1)
m.l(x).add_(m.k(x))
m.l(x).mul_(2).add_(1).relu_()
m.l(x).clone().clamp_(-0.2, 0.2)
m.l(x).zero_() + x
m.l(x).clone().fill_(2.0)
m.l(x).clone().copy_(m.k(x))
torch.zeros(4).copy_(m.l(x))
torch.zeros(4).add_(m.l(x))
torch.stack([m.l(x), m.k(x)]).sub_(1).sum(0)
F.relu(m.l(x), inplace=True)
F.dropout(m.l(x), 0.0, inplace=True)
m.l(x).masked_fill_(x > 0, 0.0)
m.l(x).index_fill(0, torch.tensor([0]), 1.0)
m.l(x).detach().add_(1) * m.k(x)
operator.iadd(m.l(x), 1)
operator.imul(m.l(x) + 0, m.k(x))
# making and joining
torch.cat([m.l(x), x])
torch.cat((m.l(x), m.k(x), m.l(x)), dim=0)
torch.stack([m.l(x), x], -1)
torch.stack([f(x) for f in m.ml]).mean(0)
torch.cat([m.l(x).view(1, 4), torch.zeros(1, 4)])
torch.zeros_like(m.l(x)) + x
torch.ones_like(x) * m.l(x)
torch.full_like(m.l(x), 2.0) * x
torch.empty_like(m.l(x)).fill_(1.0) * x
m.l(x).new_zeros(4) + x
m.l(x).new_tensor([1.0, 2.0, 3.0, 4.0]) * x
m.l(x).new_ones(2, 4) @ x
torch.zeros(m.l(x).shape) + x
torch.zeros(len(m.l(x))) + x
torch.eye(4) @ m.l(x)
torch.arange(4) * m.l(x)
torch.linspace(0, 1, 4) * m.l(x)
torch.tensor([m.l(x)[0].item(), 1.0]) * 2
torch.tensor(m.l(x).tolist()) * x
torch.as_tensor(m.l(x)) * 2
torch.hstack([m.l(x), x])
torch.vstack([m.l(x), x]).t()
torch.block_diag(m.l(x).view(2, 2), x.view(2, 2))
torch.einsum("i,j->ij", m.l(x), x)
torch.einsum("ij,j->i", m.l.weight, m.k(x))
torch.dot(m.l(x), m.k(x))
torch.addmm(m.b, m.l(x)[None], m.k.weight)
torch.bmm(m.l(x).view(1, 2, 2), m.k(x).view(1, 2, 2))
torch.cdist(m.l(x)[None], m.k(x)[None])
torch.linalg.norm(m.l(x))
torch.where(m.l(x) > 0, 1.0, m.k(x))
torch.lerp(m.l(x), m.k(x), 0.3)
torch.addcmul(m.l(x), m.k(x), x, value=0.5)
torch.maximum(m.l(x), m.k(x))
torch.broadcast_tensors(m.l(x), m.k(x)[:1])[1]
torch.meshgrid(m.l(x), m.k(x), indexing="ij")[0]
torch.atleast_2d(m.l(x))
torch.movedim(m.l(x).view(2, 2), 0, 1)
torch.nn.utils.rnn.pad_sequence([m.l(x), x[:2]])
# modules
m.ln(m.l(x))
m.seq(x)
m.seq[0](x)
m.seq[1:](m.l(x))
m.ml[0](x) + m.ml[-1](x)
functools.reduce(lambda h, f: f(h).tanh(), m.ml, x)
m.md["a"](x) + m.md["b"](x)
[f(x) for f in m.md.values()][0]
getattr(m, "l")(x)
m.get_submodule("seq.0")(x)
m._modules["l"](x)
m.l.forward(x)
nn.Module.__call__(m.l, x)
m.l(input=x)
m.gru(x[None], m.l(x)[None])[0]
m.gru(m.l(x))
m.lstm(x[None])[0][0]
m.lstm(x, (m.l(x), m.k(x)))[1]
functools.reduce(lambda h, v: m.gru(v.expand(4), h), x, m.l(x))
m.rnn(x.view(1, 1, 4))[0]
m.rnn(m.l(x).view(1, 1, 4))[1]
m.att(m.l(x)[None], x[None], x[None])[0]
m.conv(m.l(x)[None])
m.conv(x.view(1, 1, 4)).sum()
m.bil(m.l(x), x)
m.prelu(m.l(x))
m.gn(m.l(x)[None])
m.drop(m.l(x))
m.s(x)
m.s(x, m.l(x), m.k(x))
m.s(m.l(x), times=3)
m.s(x, extra={"gain": m.l(x)})
m.s(x, extra={"gain": 2.0})
m.s.twice(x)
m.s.inner(x) * m.s.scale
m.s(x) * m.config.scale + m.config.deep["bias"]
m.s.config.deep["steps"][1] * m.l(x)
nn.ReLU()(m.l(x))
nn.Softmax(dim=0)(m.l(x))
nn.CrossEntropyLoss()(m.l(x)[None], torch.tensor([1]))
nn.MSELoss(reduction="none")(m.l(x), x)
nn.Flatten(0)(m.l(x).view(2, 2))
nn.functional.linear(x, m.l.weight, m.l.bias)
F.linear(m.l(x), m.k.weight)
F.linear(x, m.l.weight.t())
F.layer_norm(m.l(x), (4,))
F.layer_norm(m.l(x), (4,), m.ln.weight, m.ln.bias, 0.1)
F.normalize(m.l(x), dim=0)
F.cosine_similarity(m.l(x), m.k(x), dim=0)
F.pad(m.l(x), (1, 2), value=0.5)
F.softmax(m.l(x), dim=-1, dtype=torch.float64).float()
F.gumbel_softmax(m.l(x) * 1e6, hard=False) * 0 + x
F.glu(m.l(x))
F.conv1d(m.l(x).view(1, 1, 4), m.conv.weight)
F.max_pool1d(m.l(x).view(1, 1, 4), 2)
F.avg_pool1d(m.l(x)[None], 2)
F.interpolate(m.l(x).view(1, 1, 4), scale_factor=2)
F.scaled_dot_product_attention(m.l(x).view(1, 2, 2), x.view(1, 2, 2), x.view(1, 2, 2))
F.cross_entropy(m.l(x), torch.tensor(2))
F.cross_entropy(m.l(x), x.argmax())
F.cross_entropy(m.l(x), torch.tensor(1), label_smoothing=0.1)
F.cross_entropy(m.l(x)[None], torch.tensor([1]), weight=m.b.abs(), reduction="sum")
F.nll_loss(m.l(x).log_softmax(0), torch.tensor(0))
F.mse_loss(m.l(x), x)
F.smooth_l1_loss(m.l(x), m.k(x), beta=0.5)
F.binary_cross_entropy_with_logits(m.l(x), (x > 0).float())
F.kl_div(m.l(x).log_softmax(0), x.softmax(0), reduction="sum")
F.pairwise_distance(m.l(x)[None], m.k(x)[None])
F.hinge_embedding_loss(m.l(x), torch.ones(4))
# control flow
m.l(x) if x.sum() > 0 else m.k(x)
m.l(x) if m.l(x).sum() > 0 else m.k(x)
m.l(x) if m.l(x).sum().item() > m.k(x).sum().item() else x
m.l(x) if len(m.l(x)) == 4 else x
m.l(x) if m.training else m.k(x)
m.l(x) if torch.is_grad_enabled() else m.k(x)
m.l(x) * (2 if m.l(x)[0] > 0 else 3)
(m.l(x) if m.l(x)[0] > 0 else x) + (m.k(x) if m.l(x)[1] > 0 else x)
(m.l(x)[0] > 0 and m.l(x)[1] > 0) * x
not m.l(x)[0] > 0 or m.k(x)
x if bool(m.l(x)[0] > 0) is True else m.k(x)
repeated(x, lambda h: m.l(h), lambda h: h.norm() < 0.9)
repeated(m.l(x), lambda h: h * 2, lambda h: h.abs().max().item() > 3)
repeated(x, lambda h: m.s(h) / 2, lambda h: bool((h > 1).any()), 3)
recurse(m, x, 3)
recurse(m, x, 1 + int(m.l(x)[0] > 0))
recurse(m, x, int(x[0] > 0) + 1)
tried(lambda: m.l(x)[9], lambda: m.k(x))
tried(lambda: m.l(x).view(3), lambda: m.k(x))
tried(lambda: [m.l(x)][1], lambda: x)
tried(lambda: m.l(x[:3]), lambda: m.k(x))
tried(lambda: int("no"), lambda: m.l(x))
next(v for v in (m.l(x), m.k(x), x) if v.sum() > -99)
[v for v in (m.l(x), m.k(x), x.abs()) if v.sum() > 0][-1]
any(v > 0 for v in m.l(x)) * x
all(v > 0 for v in m.l(x).tolist()) * x
(lambda h: h + h)(m.l(x))
(h := m.l(x)) + h.tanh()
{True: m.l, False: m.k}[bool(m.l(x)[0] > 0)](x)
[m.l, m.k][int(m.l(x)[0] > 0)](x)
(m.l if x[0] > 0 else m.k)(x)
m.ml[int(m.l(x).argmax()) % 2](x)
m.md[m.names[0]](x)
"%.3f" % m.l(x)[0].item() and m.l(x)
f"{m.l(x).sum().item():.2f}" and m.l(x)
str(m.l(x).shape) and m.l(x)
isinstance(m.l(x), torch.Tensor) * x
m.l(x).requires_grad * x
m.l(x).is_floating_point() * x
torch.is_tensor(m.l(x)) * m.l(x)
m.l(x).dtype == torch.float32 and m.l(x)
x.new_tensor(1.0 if m.l(x).device.type == "cpu" else 2.0) * x
# results
(m.l(x), m.k(x))
[m.l(x), m.k(x)]
{"a": m.l(x), "b": [m.k(x), x]}
(m.l(x), None)
(m.l(x), 3, "text")
(m.l(x), (m.k(x), {"c": m.o(x)}))
collections.namedtuple("R", "u v")(m.l(x), 2.0)
collections.OrderedDict(a=m.l(x), b=x)
m.l(x).sum().item()
m.l(x).tolist()
m.l(x).argmax().item()
bool(m.l(x)[0] > 0)
x
m.p
m.b
m.p * 2
torch.zeros(3)
x * 2
None
[]
[m.l(x)] * 2
(m.l(x), m.l(x))
list(m.l(x))
tuple(m.l(x).unbind())
dict(enumerate([m.l(x), m.k(x)]))
list(m.l(x).split(2))
# Python around it
helper(m.l(x))
helper(m.l(x), m.k(x), x, gain=0.5)
helper(m.l(x), a=m.k(x), b=1.0)
functools.partial(helper, gain=3.0)(m.l(x))
list(map(m.l, [x, x * 2]))[1]
sum(map(m.l, [x, x * 2, x * 3]))
list(generated(m.l(x), 3))[2]
sum(generated(m.l(x), 4))
list(zip([m.l(x)], [m.k(x)], strict=True))[0][1]
list(itertools.accumulate([m.l(x), m.k(x), x]))[-1]
functools.reduce(operator.mul, [m.l(x), m.k(x), x])
Pair(m.l(x), m.k(x)).left
(lambda p: p.left + p.right)(Pair(m.l(x), x))
dataclasses.replace(Pair(m.l(x), x), right=m.k(x)).right
[*m.l(x)][0]
(lambda *a, **k: a[0] + k["b"])(m.l(x), b=x)
{**{"a": m.l(x)}, "b": x}["a"]
collections.deque([m.l(x), m.k(x)], maxlen=1)[0]
collections.defaultdict(list, a=[m.l(x)])["a"][0]
(lambda d: (d.update(y=m.l(x)), d["y"])[1])({})
(lambda s: (s.append(m.l(x)), s.append(m.k(s[-1])), s.pop())[2])([])
[v * i for i, v in enumerate(m.l(x))][3]
len([v for v in m.l(x) if v > 0]) * x
set([1, 2]) and m.l(x)
id(m.l) and m.l(x)
hash(m.config) and m.l(x)
m.l(x) * m.config.scale
m.l(x) * Config.deep["steps"][-1]
m.l(x) * m.number
m.l(x) * vars(m)["number"]
m.l(x) * len(list(m.parameters()))
m.l(x) * sum(p.numel() for p in m.l.parameters())
m.l(x) + sum(p.sum() for p in m.l.parameters())
m.l(x) * sum((p**2).sum() for p in m.parameters())
m.l(x) * m.l.weight.norm()
m.l(x) * m.l.in_features
within(torch.no_grad(), lambda: m.l(x))
m.k(within(torch.no_grad(), lambda: m.l(x)))
m.l(x) + within(torch.no_grad(), lambda: m.k(x))
within(torch.enable_grad(), lambda: m.l(x))
within(torch.set_grad_enabled(False), lambda: m.l(x) * 2)
within(torch.autocast("cpu", dtype=torch.bfloat16), lambda: m.l(x))
within(contextlib.nullcontext(), lambda: m.l(x))
within(contextlib.suppress(ValueError), lambda: m.l(x))
torch.no_grad()(lambda: m.l(x))()
m.l(x.detach())
m.l(x).detach() + m.k(x)
m.l(x) + (m.k(x) - m.k(x).detach())
m.l(x).data * 2
m.l(x).detach().numpy().sum() * x
torch.from_numpy(m.l(x).detach().numpy()) * x
np.asarray(m.l(x).detach().tolist()).max() * x
np.exp(m.l(x).detach().numpy())[0].item() * x
float(m.l(x)[0]) * m.k(x)
complex(1, 2).imag * m.l(x)
torch.view_as_real(torch.complex(m.l(x), m.k(x)))
torch.fft.rfft(m.l(x)).abs()
torch.complex(m.l(x), x) * 2j
m.l(x.double().float())
m.l(x).to(torch.float64).to(torch.float32)
m.l(x).to(m.k(x))
m.l(x).type_as(x)
m.l(x).cpu()
m.l(x).to("cpu")
m.l(x).requires_grad_() * 2
m.l(x).view_as(x)
m.l(x).expand_as(torch.zeros(2, 4))
m.l(x).apply_along if hasattr(m.l(x), "apply_along") else m.l(x)
copy_of(m.l(x))
m.l(copy_of(x))
m.l(x).__add__(1)
m.l(x).__getitem__(0)
torch.Tensor.relu(m.l(x))
torch.add(m.l(x), x, alpha=2)
torch.ops.aten.relu(m.l(x))
torch.special.expit(m.l(x))
torch.vmap(lambda v: v * 2)(x) * m.l(x)
torch.func.functional_call(m.l, {"weight": m.k.weight}, (x,))
m.l(x)[[True, False, True, False]]
m.l(x).view(2, 2)[:, [True, False]]
m.l(x).view(2, 2)[[True, False], 1] * m.l(x).view(2, 2)[torch.tensor([[True, False], [False, True]])].sum()
m.l(x).view(2, 2)[[[True, False], [False, True]]]
written(m.l(x) * 1, [True, False, True, False], 0.0)
m.l(x)[Which.SECOND] * Which.SECOND + m.l(x) ** Count(2)
m.l(x).view(2, 2).sum(Which.FIRST) * Which.FIRST
torch.softmax(m.l(x).view(2, 2), Which.SECOND) + Count(3)
by_mode(m.l(x), Mode.TWICE) + m.s(x, times=Which.SECOND)
"""


def by_mode(y: Any, mode: Mode) -> Any:
    return y * 2 if mode is Mode.TWICE else y


def copy_of(y: Any) -> Any:
    """A copy made by hand."""
    return torch.stack(list(y))


def _expressions() -> list[str]:
    bodies = [_SPECIAL.get(name) or _function(name) for name in UNARY.split()]
    bodies += [_REDUCED.get(name) or _method(name) for name in REDUCTIONS.split()]
    lines = (line.strip() for line in LINES.splitlines())
    return [f"(lambda y: {body})(m.l(x))" for body in bodies] + [
        line for line in lines if line and not line.startswith("#")
    ]


def _function(name: str) -> str:
    return f"torch.{name}(y)" if hasattr(torch, name) else f"F.{name}(y)"


def _method(name: str) -> str:
    return f"y.{name}" if name.endswith((")", "]", "mT", "indices")) else f"y.{name}()"


EXPRESSIONS = _expressions()
FORWARDS: list[Callable[[Any, Any], Any]] = [
    eval(compile(f"lambda m, x: {text}", __file__, "eval"), globals())  # our own table
    for text in EXPRESSIONS
]
