"""Models on tensors of their own sizes that nobody had in mind when the rules were written: name -> Case.

In: nothing. Out: forwards of one instance, their parts, and how an instance of given sizes is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

D, K, WORDS = 8, 3, 20


class Case(NamedTuple):
    """A forward of one instance, its parts, and its instances."""

    forward: Callable[[Any, Any], Any]
    parts: Callable[[], dict[str, Any]]
    make: Callable[[int], Any]
    sizes: Sequence[Sequence[int]]


def rows(t: int) -> torch.Tensor:
    return torch.randn(t, D)


def words(t: int) -> torch.Tensor:
    return torch.randint(WORDS, (t,))


def graph(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Nodes [N, D] and edges [2, E]; a graph of one node has none."""
    edges = torch.randint(max(n, 1), (2, 2 * n if n > 1 else 0))
    return torch.randn(n, D), edges


def pair(t: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rows(t), rows((t * 3) % 7 + 1)


MIXED = ((4, 7, 2, 5), (3, 1, 6), (5, 5, 3))
WITH_NONE = (*MIXED, (0, 4, 1))
LINEAR = lambda: {"l": nn.Linear(D, D), "out": nn.Linear(D, K)}  # noqa: E731


def gcn(self: Any, g: Any) -> torch.Tensor:
    x, edges = g
    row, col = edges
    degree = x.new_zeros(len(x)).index_add(0, col, x.new_ones(edges.shape[1])) + 1
    scale = degree.rsqrt()
    h = self.l(x)
    messages = h[row] * (scale[row] * scale[col]).unsqueeze(1)
    h = torch.zeros_like(h).index_add(0, col, messages) + h * (scale * scale)[:, None]
    return self.out(torch.relu(h).mean(0))


def sage_max(self: Any, g: Any) -> torch.Tensor:
    x, edges = g
    messages = torch.relu(self.l(x))[edges[0]]
    index = edges[1].unsqueeze(1).expand_as(messages)
    most = torch.zeros_like(x).scatter_reduce(0, index, messages, "amax", include_self=True)
    return self.out(F.normalize(x + most, dim=-1).sum(0))


def edge_softmax(self: Any, g: Any) -> torch.Tensor:
    x, (source, target) = g
    h = self.l(x)
    score = F.leaky_relu((h[source] * self.a).sum(-1) + (h[target] * self.b).sum(-1), 0.2)
    power = (score - score.detach().max() if len(score) else score).exp()
    total = x.new_zeros(len(x)).index_add(0, target, power)
    weight = power / (total[target] + 1e-9)
    h = torch.zeros_like(h).index_add(0, target, weight.unsqueeze(-1) * h[source])
    return self.out(F.elu(h + x)).mean(0)


def gin(self: Any, g: Any) -> torch.Tensor:
    x, edges = g
    outs = []
    for layer in self.layers:
        x = layer((1 + self.eps) * x + torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]]))
        outs.append(x.sum(0))
    return self.out(torch.cat(outs))


def readouts(self: Any, g: Any) -> torch.Tensor:
    x, edges = g
    h = torch.relu(self.l(x)) + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
    return self.out3(torch.cat([h.sum(0), h.mean(0), h.max(0).values], -1))


def top_k_pooling(self: Any, g: Any) -> torch.Tensor:
    x, _ = g
    score = torch.tanh(self.score(x).squeeze(-1))
    k = math.ceil(len(x) / 2)
    best, index = score.topk(k)
    return self.out((x[index] * best.unsqueeze(-1)).mean(0))


def top_two(self: Any, x: torch.Tensor) -> torch.Tensor:
    best, index = self.score(x).squeeze(-1).topk(2)
    return self.out((self.l(x)[index] * best.softmax(0)[:, None]).sum(0))


def laplacian(self: Any, g: Any) -> torch.Tensor:
    x, edges = g
    n = x.shape[0]
    adjacent = x.new_zeros(n, n)
    adjacent[edges[0], edges[1]] = 1.0
    adjacent = torch.maximum(adjacent, adjacent.t()) + torch.eye(n, dtype=x.dtype)
    scale = adjacent.sum(1).rsqrt()
    return self.out((scale[:, None] * adjacent * scale[None, :]) @ self.l(x)).sum(0)


def set_transformer(self: Any, x: torch.Tensor) -> torch.Tensor:
    inducing = self.attend(self.inducing[None], x[None], x[None], need_weights=False)[0][0]
    h = self.back(x[None], inducing[None], inducing[None], need_weights=False)[0][0] + x
    pooled = self.pool(self.seed[None], h[None], h[None], need_weights=False)[0][0]
    return self.out(pooled[0])


def pointnet(self: Any, x: torch.Tensor) -> torch.Tensor:
    transform = self.t(x.max(0)[0]).view(D, D) + torch.eye(D, dtype=x.dtype)
    h = torch.relu(self.l(x @ transform))
    whole = h.amax(dim=0)
    return self.seg(torch.cat([h, whole.expand(x.size(0), -1)], dim=1)).logsumexp(0)


def detr(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = self.decoder(self.queries.unsqueeze(0), x.unsqueeze(0)).squeeze(0)
    return self.out(h), self.l(h).sigmoid()


def relative_bias(self: Any, x: torch.Tensor) -> torch.Tensor:
    t = x.size(0)
    place = torch.arange(t)
    near = (place[None] - place[:, None]).clamp(-3, 3) + 3
    q, k, v = self.qkv(x).chunk(3, -1)
    bias = self.bias(near).squeeze(-1)
    weight = torch.softmax(q @ k.t() / math.sqrt(D) + bias, -1)
    return self.out(weight @ v).mean(0)


def alibi(self: Any, x: torch.Tensor) -> torch.Tensor:
    t = len(x)
    q, k, v = (y.view(t, 2, D // 2).transpose(0, 1) for y in self.qkv(x).chunk(3, -1))
    far = torch.arange(t)[None, :] - torch.arange(t)[:, None]
    slopes = x.new_tensor([0.5, 0.25])
    bias = far[None] * slopes[:, None, None]
    mask = torch.triu(x.new_full((t, t), float("-inf")), 1)
    weight = (q @ k.transpose(1, 2) / 2 + bias + mask).softmax(-1)
    return self.out((weight @ v).transpose(0, 1).reshape(t, D))[-1]


def rotary(self: Any, x: torch.Tensor) -> torch.Tensor:
    t = len(x)
    q, k, v = self.qkv(x).chunk(3, -1)
    angle = torch.outer(torch.arange(t, dtype=x.dtype), 10 ** -torch.arange(0, D, 2, dtype=x.dtype))
    cos, sin = angle.cos(), angle.sin()

    def turned(y: torch.Tensor) -> torch.Tensor:
        a, b = y[..., ::2], y[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    h = F.scaled_dot_product_attention(turned(q)[None], turned(k)[None], v[None], is_causal=True)[0]
    return self.out(h.sum(0))


def sinusoids(self: Any, x: torch.Tensor) -> torch.Tensor:
    place = torch.arange(x.shape[0]).unsqueeze(1)
    scale = torch.exp(torch.arange(0, D, 2) * (-math.log(10000.0) / D))
    code = x.new_zeros(x.shape[0], D)
    code[:, 0::2] = torch.sin(place * scale)
    code[:, 1::2] = torch.cos(place * scale)
    return self.out(self.l(x + code).mean(0))


def crf(self: Any, x: torch.Tensor) -> torch.Tensor:
    emissions = self.out(x)
    alpha = emissions[0]
    for t in range(1, len(emissions)):
        alpha = torch.logsumexp(alpha.unsqueeze(1) + self.transitions, 0) + emissions[t]
    return alpha.logsumexp(0)


def conformer(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = x + 0.5 * self.l(F.silu(self.l(x)))
    h = h + self.attend(h[None], h[None], h[None])[0][0]
    c = self.depthwise(F.glu(self.up(h).t(), 0)[None])[0].t()
    h = self.norm(h + F.silu(c))
    return self.out(h).log_softmax(-1)


def rnn_then_attention(self: Any, x: torch.Tensor) -> torch.Tensor:
    h, last = self.gru(x)
    weight = F.softmax(h @ self.key(last[0]), dim=0)
    return self.out(weight @ h)


def elmo(self: Any, x: torch.Tensor) -> torch.Tensor:
    h, _ = self.lstm(self.embed(x))
    forward, backward = h.chunk(2, -1)
    return F.cross_entropy(self.predict(forward[:-1]), x[1:]) + F.cross_entropy(
        self.predict(backward[1:]), x[:-1]
    )


def documents(self: Any, sentences: Any) -> torch.Tensor:
    encoded = torch.stack([self.gru(self.embed(s))[0][-1] for s in sentences])
    return self.out(self.l(encoded).max(0)[0])


def document(t: int) -> list[torch.Tensor]:
    return [words(i + 2) for i in range(t % 4 + 1)]


def bilinear(self: Any, x: torch.Tensor) -> torch.Tensor:
    scores = self.l(x) @ self.w @ x.t()
    return (
        scores.fill_diagonal_(0.0).softmax(1).sum(0)
        if len(x) > 100
        else scores.log_softmax(1).diagonal().sum()
    )


def biaffine(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    head, dependent = torch.relu(self.l(x)), torch.relu(self.r(x))
    ones = x.new_ones(len(x), 1)
    scores = torch.cat([dependent, ones], 1) @ self.u @ head.t()
    chosen = scores.argmax(1)
    labels = torch.einsum("td,kde,te->tk", dependent, self.labels, head[chosen])
    return scores.logsumexp(1).sum(), labels


def spans(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.l(x)
    return self.out(torch.stack([h[i : i + 2].mean(0) for i in range(len(h) - 1)]).max(0).values)


def one_span(self: Any, given: Any) -> torch.Tensor:
    x, i, j = given
    h = self.l(x)
    return self.out(h[i:j].mean(0) + h[i] - h[j - 1])


def span_of(t: int) -> Any:
    i = t // 3
    return rows(t), i, min(i + 2, t)


def prefix_spans(self: Any, given: Any) -> torch.Tensor:
    x, starts, ends = given
    total = torch.cat([x.new_zeros(1, D), self.l(x).cumsum(0)])
    mean = (total[ends] - total[starts]) / (ends - starts).unsqueeze(1)
    return self.out(mean)


def spans_of(t: int) -> Any:
    starts = torch.randint(t, (t + 1,))
    return rows(t), starts, starts + 1


def dynamic_convolution(self: Any, x: torch.Tensor) -> torch.Tensor:
    kernel = self.kernel(x).softmax(-1)
    padded = F.pad(x, (0, 0, 2, 0))
    windows = padded.unfold(0, 3, 1)
    return self.out((windows * kernel.unsqueeze(1)).sum(-1)).mean(0)


def shifted(self: Any, x: torch.Tensor) -> torch.Tensor:
    before = torch.cat([x.new_zeros(1, D), x[:-1]])
    after = F.pad(x[1:], (0, 0, 0, 1))
    return self.out(torch.tanh(self.l(x) + self.r(before) - after).sum(0))


def two_towers(self: Any, given: Any) -> torch.Tensor:
    a, b = (self.l(x) for x in given)
    scores = a @ b.transpose(0, 1)
    ours, theirs = scores.softmax(1) @ b, scores.softmax(0).T @ a
    both = torch.cat([(a - ours).mean(0), (b * theirs).amax(0)])
    return self.out2(both)


def distances(self: Any, given: Any) -> torch.Tensor:
    a, b = given
    d = torch.cdist(self.l(a), self.l(b))
    return d.min(1).values.mean() + d.min(0).values.mean()


def kernel_matrix(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.l(x)
    d = ((h[:, None] - h[None]) ** 2).sum(-1)
    return self.out((torch.exp(-d) @ h).mean(0))


def memory(self: Any, given: Any) -> torch.Tensor:
    x, question = given
    for _ in range(2):
        weight = torch.softmax(x.mv(question), 0)
        question = question + self.l((weight[:, None] * x).sum(0))
    return self.out(question)


def pointer(self: Any, x: torch.Tensor) -> torch.Tensor:
    score = (torch.tanh(self.l(x) + self.r(x[-1])) @ self.a).log_softmax(0)
    return score[x.shape[0] // 2] + score.max()


def weighted_loss(self: Any, given: Any) -> torch.Tensor:
    x, target = given
    loss = F.cross_entropy(self.out(x), target, reduction="none")
    return (loss * (target > 0)).sum() / (target > 0).sum().clamp(min=1)


def mixture(self: Any, x: torch.Tensor) -> torch.Tensor:
    gate = self.out(x).softmax(-1)
    experts = torch.stack([self.l(x), self.r(x), x], 1)
    return (gate.unsqueeze(-1) * experts).sum(1).std(0, unbiased=False)


def vlad(self: Any, x: torch.Tensor) -> torch.Tensor:
    assign = self.out(x).softmax(-1)
    residual = x[:, None] - self.centers[None]
    made = (assign.unsqueeze(-1) * residual).sum(0)
    return F.normalize(made, dim=1).flatten()


def images(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.relu(self.conv(x))
    return self.head(F.adaptive_avg_pool2d(h, 1).flatten(1)).mean(0)


def one_image(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.head(torch.relu(self.conv(x)).mean((1, 2)))


def statistics_pooling(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.tdnn(x.t().unsqueeze(0)).squeeze(0)
    return self.out2(torch.cat([h.mean(1), h.var(1, unbiased=False).add(1e-5).sqrt()]))


def masked_words(self: Any, given: Any) -> torch.Tensor:
    tokens, mask = given
    h = torch.where(mask[:, None], self.mask, self.embed(tokens))
    h = self.encoder(h.unsqueeze(1)).squeeze(1)
    return F.cross_entropy(self.predict(h), tokens, reduction="sum") / len(tokens)


def edge_convolution(self: Any, x: torch.Tensor) -> torch.Tensor:
    near = torch.cdist(x, x).topk(3, largest=False).indices
    here = x.unsqueeze(1).expand(-1, 3, -1)
    return self.out(self.both(torch.cat([here, x[near] - here], -1)).relu().max(1).values.max(0).values)


def distances_as_filters(self: Any, x: torch.Tensor) -> torch.Tensor:
    d = torch.cdist(x, x).unsqueeze(-1)
    filters = self.l(torch.exp(-((d - self.centers) ** 2))) * (0.5 * (torch.cos(d) + 1))
    h = torch.einsum("ij,ijd,jd->id", 1 - torch.eye(len(x), dtype=x.dtype), filters, self.r(x))
    return self.out(F.softplus(x + h)).sum(0)


def heads_of_words(self: Any, given: Any) -> torch.Tensor:
    x, heads = given
    h = torch.cat([self.root, self.l(x)])
    scores = self.r(h[1:]) @ h.t()
    return F.cross_entropy(scores, heads, ignore_index=-1) + F.cross_entropy(scores.t()[1:], heads - 1)


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, **options)


def attention() -> nn.Module:
    return nn.MultiheadAttention(D, 2, batch_first=True)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


CASES: dict[str, Case] = {
    "GCN": Case(gcn, LINEAR, graph, MIXED),
    "GraphSAGE": Case(sage_max, LINEAR, graph, WITH_NONE),
    "edge softmax": Case(
        edge_softmax, lambda: {**LINEAR(), "a": parameter(D), "b": parameter(D)}, graph, ((4, 7, 2, 5), (5, 5, 3))
    ),
    "GIN": Case(
        gin,
        lambda: {
            "layers": nn.ModuleList([nn.Sequential(nn.Linear(D, D), nn.ReLU()) for _ in range(2)]),
            "eps": parameter(1), "out": nn.Linear(2 * D, K),
        },
        graph, WITH_NONE,
    ),
    "readouts": Case(readouts, lambda: {**LINEAR(), "out3": nn.Linear(3 * D, K)}, graph, MIXED),
    "top-k pooling": Case(top_k_pooling, lambda: {**LINEAR(), "score": nn.Linear(D, 1)}, graph, MIXED),
    "top two": Case(top_two, lambda: {**LINEAR(), "score": nn.Linear(D, 1)}, rows, ((4, 7, 2, 5), (3, 2, 6))),
    "Laplacian": Case(laplacian, LINEAR, graph, MIXED),
    "set transformer": Case(
        set_transformer,
        lambda: {
            "attend": attention(), "back": attention(), "pool": attention(), "inducing": parameter(4, D),
            "seed": parameter(1, D), "out": nn.Linear(D, K),
        },
        rows, MIXED,
    ),
    "PointNet": Case(
        pointnet, lambda: {**LINEAR(), "t": nn.Linear(D, D * D), "seg": nn.Linear(2 * D, K)}, rows, MIXED
    ),
    "DETR": Case(
        detr,
        lambda: {
            "decoder": nn.TransformerDecoderLayer(D, 2, 16, dropout=0.0, batch_first=True),
            "queries": parameter(5, D), **LINEAR(),
        },
        rows, MIXED,
    ),
    "relative bias": Case(
        relative_bias,
        lambda: {"qkv": nn.Linear(D, 3 * D), "bias": nn.Embedding(7, 1), "out": nn.Linear(D, K)}, rows, MIXED,
    ),
    "ALiBi": Case(alibi, lambda: {"qkv": nn.Linear(D, 3 * D), "out": nn.Linear(D, K)}, rows, MIXED),
    "rotary": Case(rotary, lambda: {"qkv": nn.Linear(D, 3 * D), "out": nn.Linear(D, K)}, rows, MIXED),
    "sinusoids": Case(sinusoids, LINEAR, rows, MIXED),
    "CRF": Case(crf, lambda: {"out": nn.Linear(D, K), "transitions": parameter(K, K)}, rows, MIXED),
    "conformer": Case(
        conformer,
        lambda: {
            **LINEAR(), "attend": attention(), "up": nn.Linear(D, 2 * D), "norm": nn.LayerNorm(D),
            "depthwise": nn.Conv1d(D, D, 3, padding=1, groups=D),
        },
        rows, MIXED,
    ),
    "GRU then attention": Case(
        rnn_then_attention,
        lambda: {"gru": nn.GRU(D, D), "key": nn.Linear(D, D), "out": nn.Linear(D, K)}, rows, MIXED,
    ),
    "ELMo": Case(
        elmo,
        lambda: {
            "embed": nn.Embedding(WORDS, D), "lstm": nn.LSTM(D, D, bidirectional=True),
            "predict": nn.Linear(D, WORDS),
        },
        words, ((4, 7, 2, 5), (3, 2, 6)),
    ),
    "documents": Case(
        documents, lambda: {"embed": nn.Embedding(WORDS, D), "gru": nn.GRU(D, D), **LINEAR()}, document, MIXED
    ),
    "pairwise scores": Case(bilinear, lambda: {**LINEAR(), "w": parameter(D, D)}, rows, MIXED),
    "biaffine": Case(
        biaffine,
        lambda: {**LINEAR(), "r": nn.Linear(D, D), "u": parameter(D + 1, D), "labels": parameter(K, D, D)},
        rows, MIXED,
    ),
    "spans": Case(spans, LINEAR, rows, ((4, 7, 2, 5), (3, 2, 6))),
    "one span": Case(one_span, LINEAR, span_of, MIXED),
    "prefix sums": Case(prefix_spans, LINEAR, spans_of, MIXED),
    "dynamic convolution": Case(
        dynamic_convolution, lambda: {"kernel": nn.Linear(D, 3), "out": nn.Linear(D, K)}, rows, MIXED
    ),
    "shifts": Case(shifted, lambda: {**LINEAR(), "r": nn.Linear(D, D)}, rows, MIXED),
    "two towers": Case(two_towers, lambda: {**LINEAR(), "out2": nn.Linear(2 * D, K)}, pair, MIXED),
    "distances": Case(distances, LINEAR, pair, MIXED),
    "kernel matrix": Case(kernel_matrix, LINEAR, rows, WITH_NONE[:3]),
    "memory network": Case(memory, LINEAR, lambda t: (rows(t), torch.randn(D)), MIXED),
    "pointer": Case(pointer, lambda: {**LINEAR(), "r": nn.Linear(D, D), "a": parameter(D)}, rows, MIXED),
    "weighted loss": Case(
        weighted_loss, LINEAR, lambda t: (rows(t), torch.randint(K, (t,))), WITH_NONE
    ),
    "mixture": Case(mixture, lambda: {**LINEAR(), "r": nn.Linear(D, D)}, rows, MIXED),
    "NetVLAD": Case(vlad, lambda: {**LINEAR(), "centers": parameter(K, D)}, rows, WITH_NONE),
    "bag of images": Case(
        images, lambda: {"conv": nn.Conv2d(2, 4, 3), "head": nn.Linear(4, K)}, lambda t: torch.randn(t, 2, 6, 6),
        MIXED,
    ),
    "one image": Case(
        one_image, lambda: {"conv": nn.Conv2d(2, 4, 3, padding=1), "head": nn.Linear(4, K)},
        lambda t: torch.randn(2, t + 1, 5), MIXED,
    ),
    "statistics pooling": Case(
        statistics_pooling, lambda: {"tdnn": nn.Conv1d(D, D, 3, dilation=2, padding=2), "out2": nn.Linear(2 * D, K)},
        rows, MIXED,
    ),
    "edge convolution": Case(
        edge_convolution, lambda: {"both": nn.Linear(2 * D, D), "out": nn.Linear(D, K)}, rows,
        ((4, 7, 3, 5), (5, 3, 6)),
    ),
    "distances as filters": Case(
        distances_as_filters, lambda: {**LINEAR(), "r": nn.Linear(D, D), "centers": parameter(D)}, rows,
        ((4, 7, 2, 5), (3, 2, 6)),
    ),
    "heads of words": Case(
        heads_of_words, lambda: {"l": nn.Linear(D, D), "r": nn.Linear(D, D), "root": parameter(1, D)},
        lambda t: (rows(t), torch.randint(1, t + 1, (t,))), MIXED,
    ),
    "masked words": Case(
        masked_words,
        lambda: {
            "embed": nn.Embedding(WORDS, D), "mask": parameter(D), "encoder": encoder(),
            "predict": nn.Linear(D, WORDS),
        },
        lambda t: (words(t), torch.rand(t) < 0.4), MIXED,
    ),
}  # fmt: skip
