"""More models as public repositories write them (points, speech, recommenders, readers, graphs): name -> Case.

In: nothing. Out: as in `own_size_models.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.ragged.own_size_models import (
    LINEAR,
    MIXED,
    WITH_NONE,
    WORDS,
    Case,
    D,
    K,
    encoder,
    graph,
    pair,
    parameter,
    rows,
    words,
)

TWO_OR_MORE = ((4, 7, 2, 5), (3, 2, 6), (5, 5, 3))


def pointer_decoder(self: Any, x: torch.Tensor) -> torch.Tensor:
    h, state = self.l(x), x.mean(0)
    used = torch.zeros(len(x), dtype=torch.bool)
    score = x.new_zeros(())
    for _ in range(2):
        logits = (torch.tanh(h + self.r(state)) @ self.v).masked_fill(used, -1e4)
        logp = F.log_softmax(logits, 0)
        chosen = logp.argmax(0)
        score = score + logp[chosen]
        used = used | F.one_hot(chosen, len(x)).bool()
        state = (logp.exp().unsqueeze(1) * h).sum(0)
    return score


def egnn(self: Any, g: Any) -> tuple[torch.Tensor, torch.Tensor]:
    h, place, edges = g
    row, col = edges
    apart = place[row] - place[col]
    square = (apart**2).sum(1, keepdim=True)
    m = F.silu(self.edge(torch.cat([h[row], h[col], square], 1)))
    moved = place + torch.zeros_like(place).index_add_(0, row, apart * self.weight(m))
    agg = torch.zeros(h.size(0), m.size(1), dtype=h.dtype).scatter_add_(0, row[:, None].expand_as(m), m)
    return h + self.node(torch.cat([h, agg], 1)), moved


def placed(t: int) -> Any:
    x, edges = graph(t)
    return x, torch.randn(t, 3), edges


def point_transformer(self: Any, x: torch.Tensor) -> torch.Tensor:
    k = 2
    near = torch.cdist(x[:, :3], x[:, :3]).topk(k, largest=False).indices
    q, key, value = self.q(x), self.k(x), self.v(x)
    place = self.place(x[:, None, :3] - x[near][..., :3])
    weight = (q[:, None] - key[near] + place).softmax(1)
    return self.out((weight * (value[near] + place)).sum(1)).amax(0)


def ball_query(self: Any, x: torch.Tensor) -> torch.Tensor:
    distance = (x[:, None] - x[None]).pow(2).sum(-1)
    inside = distance < 6.0
    h = F.relu(self.l(x)).unsqueeze(0).expand(len(x), -1, -1)
    return self.out(h.masked_fill(~inside.unsqueeze(-1), float("-inf")).amax(1)).mean(0)


def graph_u_net(self: Any, g: Any) -> torch.Tensor:
    x, edges = g
    adjacency = torch.zeros(len(x), len(x), dtype=x.dtype)
    adjacency[edges[0], edges[1]] = 1.0
    h = F.relu(adjacency @ self.l(x) + x)
    score = torch.sigmoid(self.score(h).squeeze(-1))
    kept = score.topk((len(x) + 1) // 2).indices
    small = h[kept] * score[kept].unsqueeze(1)
    small = F.relu(adjacency[kept][:, kept] @ self.r(small) + small)
    up = torch.zeros_like(h).index_copy(0, kept, small)
    return self.out(h + up)


def isab(self: Any, x: torch.Tensor) -> torch.Tensor:
    inner, _ = self.first(self.points, x, x)
    h, _ = self.second(x, inner, inner)
    pooled, weight = self.pool(self.seed, h, h)
    return self.out(pooled).squeeze(0) + weight.sum()


def slot_attention(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.norm(x)
    k, v, slots = self.k(x), self.v(x), self.slots
    for _ in range(2):
        logits = k @ self.q(slots).t() / math.sqrt(D)
        weight = logits.softmax(-1) + 1e-8
        weight = weight / weight.sum(0, keepdim=True)
        slots = self.gru(weight.t() @ v, slots)
    return self.out(slots)


def attention_over_attention(self: Any, given: Any) -> torch.Tensor:
    document, query = given
    m = self.l(document) @ query.t()
    alpha, beta = m.softmax(0), m.softmax(1).mean(0)
    return self.out((alpha @ beta) @ document)


def bidaf(self: Any, given: Any) -> torch.Tensor:
    c, q = given
    s = (c.unsqueeze(1) * self.w * q.unsqueeze(0)).sum(-1) + self.a(c) + self.b(q).t()
    c2q = F.softmax(s, dim=-1) @ q
    q2c = (F.softmax(s.max(-1)[0], dim=0).unsqueeze(0) @ c).expand(c.size(0), -1)
    g = torch.cat([c, c2q, c * c2q, c * q2c], -1)
    start = self.start(g).squeeze(-1)
    return F.log_softmax(start, dim=-1)


def subsampled_speech(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.relu(self.c1(x.t().unsqueeze(0)))
    h = F.relu(self.c2(h)).squeeze(0).t()
    h, _ = self.lstm(h)
    return self.out(h).log_softmax(-1)


def x_vector(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = x.t()[None]
    for conv in self.convs:
        h = F.relu(conv(h))
    pooled = torch.cat([h.mean(2), (h.var(2, unbiased=False) + 1e-5).sqrt()], 1)
    return self.out(pooled)[0]


def location_attention(self: Any, x: torch.Tensor) -> torch.Tensor:
    weight = x.new_zeros(len(x))
    total, state = weight, self.state
    for _ in range(2):
        place = self.conv(torch.stack([weight, total])[None])[0].t()
        weight = (torch.tanh(self.l(x) + self.q(state) + self.p(place)) @ self.v).softmax(0)
        total = total + weight
        state = self.cell(weight @ x, state)
    return self.out(state)


def one_dimensional_u_net(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.relu(self.c1(x.t()[None]))
    low = F.avg_pool1d(h, 2, ceil_mode=True)
    low = F.relu(self.c2(low))
    up = low.repeat_interleave(2, dim=2)[:, :, : h.shape[-1]]
    return self.out((h + up)[0].t())


def long_convolution(self: Any, x: torch.Tensor) -> torch.Tensor:
    t = len(x)
    kernel = torch.exp(-torch.arange(t, dtype=x.dtype)[:, None] * F.softplus(self.rate))
    mixed = torch.fft.irfft(
        torch.fft.rfft(x, n=2 * t, dim=0) * torch.fft.rfft(kernel, n=2 * t, dim=0), n=2 * t, dim=0
    )
    return self.out(mixed[:t])


def retention(self: Any, x: torch.Tensor) -> torch.Tensor:
    t = len(x)
    n = torch.arange(t)
    apart = (n[:, None] - n[None, :]).to(x.dtype)
    decay = torch.where(apart >= 0, 0.9**apart, torch.zeros_like(apart))
    return self.out((self.q(x) @ self.k(x).t() * decay) @ x)


def banded(self: Any, x: torch.Tensor) -> torch.Tensor:
    t = len(x)
    band = torch.ones(t, t, dtype=torch.bool).triu(-1) & torch.ones(t, t, dtype=torch.bool).tril(1)
    q, k, v = self.qkv(x).chunk(3, -1)
    return self.out(F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=band)[0])


def gpt(self: Any, x: torch.Tensor) -> torch.Tensor:
    t = x.size(0)
    h = self.embed(x) + self.place.weight[:t]
    q, k, v = self.qkv(self.norm(h)).split(D, dim=-1)
    q, k, v = (y.view(t, 2, D // 2).transpose(0, 1) for y in (q, k, v))
    weight = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    weight = weight.masked_fill(self.mask[:t, :t] == 0, float("-inf")).softmax(-1)
    h = h + (weight @ v).transpose(0, 1).contiguous().view(t, D)
    return F.cross_entropy(self.out(h), x % K, reduction="mean")


def relative_shift(self: Any, x: torch.Tensor) -> torch.Tensor:
    t = len(x)
    place = self.r(self.table[: 2 * t - 1])
    scores = self.l(x) @ place.t()
    padded = F.pad(scores, (1, 0)).view(2 * t, t)
    shifted = padded[1:].reshape(t, 2 * t - 1)[:, :t]
    return self.out(shifted.softmax(-1) @ x)


def span_reader(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    start, end = self.two(x).unbind(-1)
    joint = (start[:, None] + end[None, :]).triu() + torch.full((len(x), len(x)), -1e3, dtype=x.dtype).tril(
        -1
    )
    best = joint.flatten().argmax()
    return joint.flatten().logsumexp(0), joint.flatten()[best]


def mention_pairs(self: Any, x: torch.Tensor) -> torch.Tensor:
    score = self.score(x).squeeze(1)
    k = max(1, int(0.5 * len(x)))
    top, chosen = score.topk(k)
    g = x[chosen]
    pairs = torch.cat([g.unsqueeze(1).expand(k, k, D), g.unsqueeze(0).expand(k, k, D)], -1)
    antecedent = self.pair(pairs).squeeze(-1) + top[:, None] + top[None]
    return antecedent.logsumexp(1)


def label_attention(self: Any, x: torch.Tensor) -> torch.Tensor:
    weight = torch.softmax(self.labels @ torch.tanh(self.l(x)).t(), dim=1)
    return (self.labels * (weight @ x)).sum(1)


def session_graph(self: Any, given: Any) -> torch.Tensor:
    items, adjacency, alias = given
    h = self.embed(items)
    both = torch.cat([adjacency @ self.l(h), adjacency.t() @ self.r(h)], 1)
    h = self.cell(both, h)
    seq = h[alias]
    last = seq[-1]
    weight = torch.sigmoid(self.q(seq) + self.k(last)) @ self.v
    return self.embed.weight @ (weight.unsqueeze(1) * seq).sum(0)


def session(t: int) -> Any:
    return words(t), torch.rand(t, t), torch.randint(max(t, 1), (t + 2,))


def list_mle(self: Any, given: Any) -> torch.Tensor:
    x, relevance = given
    scores = self.score(x).squeeze(-1)
    order = relevance.argsort(descending=True)
    scores = scores[order]
    return (scores.flip(0).logcumsumexp(0).flip(0) - scores).mean()


def ranked(t: int) -> Any:
    return rows(t), torch.randn(t)


def appnp(self: Any, g: Any) -> torch.Tensor:
    x, edges = g
    loops = torch.arange(x.size(0)).repeat(2, 1)
    edges = torch.cat([edges, loops], 1)
    row, col = edges
    degree = torch.zeros(x.size(0), dtype=x.dtype).scatter_add(0, col, torch.ones(row.size(0), dtype=x.dtype))
    norm = degree.clamp(min=1).pow(-0.5)
    weight = norm[row] * norm[col]
    h = first = self.l(x)
    for _ in range(3):
        h = 0.9 * torch.zeros_like(h).index_add(0, col, weight[:, None] * h[row]) + 0.1 * first
    return self.out(h)


def virtual_node(self: Any, g: Any) -> torch.Tensor:
    x, edges = g
    v = self.virtual
    for _ in range(2):
        x = x + v
        m = torch.zeros_like(x).scatter_reduce(
            0, edges[1][:, None].expand(-1, D), x[edges[0]], "amax", include_self=False
        )
        v = v + F.relu(self.r(x.sum(0)))
        x = F.relu(self.l(x + m))
    return self.out(torch.cat([x.mean(0), v]))


def link_prediction(self: Any, g: Any) -> torch.Tensor:
    x, edges = g
    h = self.l(x)
    negative = torch.stack([edges[0], edges[1].flip(0)])
    both = torch.cat([edges, negative], dim=1)
    logits = (h[both[0]] * h[both[1]]).sum(-1)
    label = torch.cat([torch.ones(edges.size(1)), torch.zeros(negative.size(1))]).to(x.dtype)
    return F.binary_cross_entropy_with_logits(logits, label, reduction="sum")


def half_edges(self: Any, g: Any) -> torch.Tensor:
    x, edges = g
    once = edges[:, edges[0] < edges[1]]
    return self.out((self.l(x)[once[0]] * x[once[1]]).sum(0))


def positive_rows(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.l(x)
    return self.out(h[x.sum(1) > 0].sum(0))


def overlaps(self: Any, given: Any) -> torch.Tensor:
    corner, size = given
    first, last = corner, corner + size
    low = torch.max(first[:, None], first[None])
    high = torch.min(last[:, None], last[None])
    inter = (high - low).clamp(min=0).prod(-1)
    area = size.prod(-1)
    iou = inter / (area[:, None] + area[None] - inter)
    return self.out(iou.softmax(-1) @ torch.cat([corner, size], -1).repeat(1, 2))


def boxes(t: int) -> Any:
    return torch.rand(t, 2), torch.rand(t, 2) + 0.1


def einsum_heads(self: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (part(x).view(-1, 2, D // 2) for part in (self.q, self.k, self.v))
    weight = torch.einsum("ihd,jhd->hij", q, k).div(2.0).softmax(-1)
    return self.out(torch.einsum("hij,jhd->ihd", weight, v).reshape(len(x), D))


def masked_language(self: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = x % 3 == 0
    h = self.encoder(self.embed(torch.where(hidden, torch.zeros_like(x), x))[None])[0]
    target = x.masked_fill(~hidden, -100) % K
    target = torch.where(hidden, target, torch.full_like(target, -100))
    return F.cross_entropy(self.out(h), target, ignore_index=-100, reduction="sum") / hidden.sum().clamp(
        min=1
    )


def pairs_of_rows(self: Any, x: torch.Tensor) -> torch.Tensor:
    i, j = torch.triu_indices(len(x), len(x), 1)
    return self.out(F.relu(self.l(x)[i] * x[j]).sum(0))


def mirrored(self: Any, x: torch.Tensor) -> torch.Tensor:
    both = torch.cat([x, x.flip(0)])
    h, _ = self.gru(both)
    return self.out(h[len(x) :] - h[: len(x)])


def grid(self: Any, given: Any) -> torch.Tensor:
    a, b = given
    i, j = torch.meshgrid(torch.arange(len(a)), torch.arange(len(b)), indexing="ij")
    far = (i / max(len(a), 1) - j / max(len(b), 1)).abs().to(a.dtype)
    return ((a @ self.l(b).t()) * torch.exp(-far)).sum()


def whole_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.out(F.layer_norm(self.l(x), x.shape))


def middle_state(self: Any, x: torch.Tensor) -> torch.Tensor:
    h, (last, cell) = self.lstm(x)
    return self.out(torch.cat([h[len(x) // 2], last[-1], cell[0]]))


def capsule(self: Any, x: torch.Tensor) -> torch.Tensor:
    votes = torch.einsum("td,kde->tke", x, self.w)
    logits = votes.new_zeros(votes.shape[:2])
    for _ in range(2):
        c = logits.softmax(1)
        s = (c.unsqueeze(-1) * votes).sum(0)
        norm = s.square().sum(-1, keepdim=True)
        v = norm / (1 + norm) * s / (norm + 1e-6).sqrt()
        logits = logits + (votes * v).sum(-1)
    return v


def optimal_transport(self: Any, given: Any) -> torch.Tensor:
    a, b = given
    cost = torch.cdist(self.l(a), b)
    f, g = cost.new_zeros(len(a)), cost.new_zeros(len(b))
    for _ in range(2):
        f = -torch.logsumexp(g[None] - cost, 1)
        g = -torch.logsumexp(f[:, None] - cost, 0)
    return (torch.exp(f[:, None] + g[None] - cost) * cost).sum()


def copy_mechanism(self: Any, given: Any) -> torch.Tensor:
    source, state = given
    h = self.embed(source)
    weight = torch.softmax(self.l(h) @ state, 0)
    gate = torch.sigmoid(self.gate(state))
    made = gate * torch.softmax(self.vocabulary(state), 0)
    return torch.log(made.scatter_add(0, source, (1 - gate) * weight) + 1e-9)


def copied(t: int) -> Any:
    return words(t), torch.randn(D)


def first_of_runs(self: Any, x: torch.Tensor) -> torch.Tensor:
    change = torch.cat([torch.ones(1, dtype=torch.bool), x[1:] != x[:-1]])
    piece = change.long().cumsum(0) - 1
    h = self.embed(x)
    total = torch.zeros_like(h).index_add(0, piece, h)
    count = torch.zeros(len(x), dtype=h.dtype).index_add(0, piece, torch.ones(len(x), dtype=h.dtype))
    return self.out(total / count.clamp(min=1)[:, None])


def forward_difference(self: Any, x: torch.Tensor) -> torch.Tensor:
    step = torch.diff(x, dim=0)
    return self.out(torch.cat([x.mean(0), step.abs().sum(0)]))


def gumbel(self: Any, x: torch.Tensor) -> torch.Tensor:
    score = self.score(x).squeeze(-1)
    hard = torch.zeros_like(score).scatter(0, score.argmax(0, keepdim=True), 1.0)
    return self.out((hard - score.softmax(0).detach() + score.softmax(0)) @ x)


def laplacian_positions(self: Any, g: Any) -> torch.Tensor:
    x, edges = g
    a = torch.zeros(len(x), len(x), dtype=x.dtype).index_put(
        (edges[0], edges[1]), torch.ones(edges.shape[1], dtype=x.dtype), accumulate=True
    )
    a = a + a.t() + torch.eye(len(x), dtype=x.dtype)
    d = torch.diag(a.sum(1).rsqrt())
    return self.out(d @ a @ d @ self.l(x))


def interpolated(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.interpolate(x.t()[None], size=6, mode="linear", align_corners=False)[0].t()
    return self.out(h)


def stretched(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.interpolate(self.l(x).t()[None], scale_factor=2, mode="nearest")[0].t()
    return self.out(h)


def three() -> dict[str, Any]:
    return {"q": nn.Linear(D, D), "k": nn.Linear(D, D), "v": nn.Linear(D, D), "out": nn.Linear(D, K)}


CASES: dict[str, Case] = {
    "pointer decoder": Case(
        pointer_decoder, lambda: {**LINEAR(), "r": nn.Linear(D, D), "v": parameter(D)}, rows, MIXED
    ),
    "EGNN": Case(
        egnn,
        lambda: {"edge": nn.Linear(2 * D + 1, D), "weight": nn.Linear(D, 1), "node": nn.Linear(2 * D, D)},
        placed,
        MIXED,
    ),
    "point transformer": Case(
        point_transformer, lambda: {**three(), "place": nn.Linear(3, D)}, rows, TWO_OR_MORE
    ),
    "ball query": Case(ball_query, LINEAR, rows, MIXED),
    "graph U-net": Case(
        graph_u_net,
        lambda: {**LINEAR(), "r": nn.Linear(D, D), "score": nn.Linear(D, 1)},
        graph,
        MIXED,
    ),
    "ISAB": Case(
        isab,
        lambda: {
            "points": parameter(2, D),
            "seed": parameter(1, D),
            "first": nn.MultiheadAttention(D, 2),
            "second": nn.MultiheadAttention(D, 2),
            "pool": nn.MultiheadAttention(D, 2),
            "out": nn.Linear(D, K),
        },
        rows,
        MIXED,
    ),
    "slot attention": Case(
        slot_attention,
        lambda: {**three(), "norm": nn.LayerNorm(D), "slots": parameter(3, D), "gru": nn.GRUCell(D, D)},
        rows,
        MIXED,
    ),
    "attention over attention": Case(attention_over_attention, LINEAR, pair, MIXED),
    "BiDAF": Case(
        bidaf,
        lambda: {"w": parameter(D), "a": nn.Linear(D, 1), "b": nn.Linear(D, 1), "start": nn.Linear(4 * D, 1)},
        pair,
        MIXED,
    ),
    "subsampled speech": Case(
        subsampled_speech,
        lambda: {
            "c1": nn.Conv1d(D, D, 3, 2, 1),
            "c2": nn.Conv1d(D, D, 3, 2, 1),
            "lstm": nn.LSTM(D, D, 2),
            "out": nn.Linear(D, K),
        },
        rows,
        MIXED,
    ),
    "x-vector": Case(
        x_vector,
        lambda: {
            "convs": nn.ModuleList([nn.Conv1d(D, D, 3, dilation=d, padding=d) for d in (1, 2)]),
            "out": nn.Linear(2 * D, K),
        },
        rows,
        MIXED,
    ),
    "location attention": Case(
        location_attention,
        lambda: {
            **LINEAR(),
            "conv": nn.Conv1d(2, 4, 3, padding=1),
            "p": nn.Linear(4, D),
            "q": nn.Linear(D, D),
            "v": parameter(D),
            "state": parameter(D),
            "cell": nn.GRUCell(D, D),
        },
        rows,
        MIXED,
    ),
    "U-net in one dimension": Case(
        one_dimensional_u_net,
        lambda: {
            "c1": nn.Conv1d(D, D, 3, padding=1),
            "c2": nn.Conv1d(D, D, 3, padding=1),
            "out": nn.Linear(D, K),
        },
        rows,
        MIXED,
    ),
    "long convolution": Case(long_convolution, lambda: {**LINEAR(), "rate": parameter(D)}, rows, MIXED),
    "retention": Case(retention, three, rows, MIXED),
    "banded": Case(banded, lambda: {"qkv": nn.Linear(D, 3 * D), "out": nn.Linear(D, K)}, rows, MIXED),
    "GPT": Case(
        gpt,
        lambda: {
            "embed": nn.Embedding(WORDS, D),
            "place": nn.Embedding(12, D),
            "qkv": nn.Linear(D, 3 * D),
            "norm": nn.LayerNorm(D),
            "mask": nn.Buffer(torch.ones(12, 12).tril()),
            "out": nn.Linear(D, K),
        },
        words,
        MIXED,
    ),
    "relative shift": Case(
        relative_shift, lambda: {**LINEAR(), "r": nn.Linear(D, D), "table": parameter(20, D)}, rows, MIXED
    ),
    "span reader": Case(span_reader, lambda: {"two": nn.Linear(D, 2)}, rows, MIXED),
    "mention pairs": Case(
        mention_pairs, lambda: {"score": nn.Linear(D, 1), "pair": nn.Linear(2 * D, 1)}, rows, MIXED
    ),
    "label attention": Case(
        label_attention, lambda: {**LINEAR(), "labels": parameter(K, D)}, rows, WITH_NONE
    ),
    "session graph": Case(
        session_graph,
        lambda: {
            **three(),
            "l": nn.Linear(D, D),
            "r": nn.Linear(D, D),
            "embed": nn.Embedding(WORDS, D),
            "cell": nn.GRUCell(2 * D, D),
            "v": parameter(D),
        },
        session,
        MIXED,
    ),
    "ListMLE": Case(list_mle, lambda: {"score": nn.Linear(D, 1)}, ranked, MIXED),
    "APPNP": Case(appnp, LINEAR, graph, MIXED),
    "virtual node": Case(
        virtual_node,
        lambda: {
            "l": nn.Linear(D, D),
            "r": nn.Linear(D, D),
            "virtual": parameter(D),
            "out": nn.Linear(2 * D, K),
        },
        graph,
        MIXED,
    ),
    "link prediction": Case(link_prediction, LINEAR, graph, MIXED),
    "half the edges": Case(half_edges, LINEAR, graph, MIXED),
    "positive rows": Case(positive_rows, LINEAR, rows, MIXED),
    "overlaps": Case(overlaps, LINEAR, boxes, MIXED),
    "einsum heads": Case(einsum_heads, three, rows, MIXED),
    "masked language": Case(
        masked_language,
        lambda: {"embed": nn.Embedding(WORDS, D), "encoder": encoder(), "out": nn.Linear(D, K)},
        words,
        MIXED,
    ),
    "pairs of rows": Case(pairs_of_rows, LINEAR, rows, MIXED),
    "mirrored": Case(mirrored, lambda: {"gru": nn.GRU(D, D), "out": nn.Linear(D, K)}, rows, MIXED),
    "grid": Case(grid, LINEAR, pair, MIXED),
    "norm of all rows": Case(whole_norm, LINEAR, rows, MIXED),
    "middle state": Case(
        middle_state, lambda: {"lstm": nn.LSTM(D, D, 2), "out": nn.Linear(3 * D, K)}, rows, MIXED
    ),
    "capsules": Case(capsule, lambda: {"w": parameter(3, D, 4)}, rows, MIXED),
    "optimal transport": Case(optimal_transport, LINEAR, pair, MIXED),
    "copy mechanism": Case(
        copy_mechanism,
        lambda: {
            "embed": nn.Embedding(WORDS, D),
            "l": nn.Linear(D, D),
            "gate": nn.Linear(D, 1),
            "vocabulary": nn.Linear(D, WORDS),
        },
        copied,
        WITH_NONE,
    ),
    "runs": Case(
        first_of_runs, lambda: {"embed": nn.Embedding(WORDS, D), "out": nn.Linear(D, K)}, words, MIXED
    ),
    "differences": Case(forward_difference, lambda: {"out": nn.Linear(2 * D, K)}, rows, MIXED),
    "straight through": Case(gumbel, lambda: {"score": nn.Linear(D, 1), "out": nn.Linear(D, K)}, rows, MIXED),
    "normalised adjacency": Case(laplacian_positions, LINEAR, graph, MIXED),
    "interpolated": Case(interpolated, LINEAR, rows, MIXED),
    "stretched": Case(stretched, LINEAR, rows, MIXED),
}
