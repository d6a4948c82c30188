"""Models as users of PyG, Transformers or vmap write them, on tensors of their own sizes: name -> Case.

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


def learned_positions(self: Any, x: torch.Tensor) -> torch.Tensor:
    place = torch.arange(len(x), device=x.device)
    h = self.norm(self.embed(x) + self.place(place))
    return self.out(self.encoder(h.unsqueeze(0)).squeeze(0)[0])


def rotary_halves(self: Any, x: torch.Tensor) -> torch.Tensor:
    t, heads, size = x.shape[0], 2, D // 2
    q, k, v = (self.qkv(x).view(t, 3, heads, size).permute(1, 2, 0, 3)).unbind(0)
    freq = 1.0 / (10000 ** (torch.arange(0, size, 2, device=x.device).float() / size))
    angle = torch.einsum("i,j->ij", torch.arange(t, device=x.device).float(), freq)
    angle = torch.cat((angle, angle), dim=-1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)

    def half(y: torch.Tensor) -> torch.Tensor:
        a, b = y[..., : y.shape[-1] // 2], y[..., y.shape[-1] // 2 :]
        return torch.cat((-b, a), dim=-1)

    q, k = q * cos + half(q) * sin, k * cos + half(k) * sin
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(size)
    mask = torch.full((t, t), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
    weight = F.softmax(scores + mask, dim=-1, dtype=torch.float32).to(q.dtype)
    return self.out(torch.matmul(weight, v).transpose(0, 1).contiguous().view(t, -1))


def t5_buckets(self: Any, x: torch.Tensor) -> torch.Tensor:
    t = x.shape[0]
    context = torch.arange(t)[:, None]
    memory = torch.arange(t)[None, :]
    far = memory - context
    bucket = (far > 0).long() * 4
    far = far.abs()
    small = far < 2
    large = 2 + (torch.log(far.float() / 2 + 1e-6) / math.log(8 / 2) * 2).long()
    large = torch.min(large, torch.full_like(large, 3))
    bucket = bucket + torch.where(small, far, large)
    bias = self.bias(bucket).permute(2, 0, 1)
    q = self.l(x).view(t, 2, -1).transpose(0, 1)
    weight = (q @ q.transpose(1, 2) + bias).softmax(-1)
    return self.out((weight @ q).transpose(0, 1).flatten(1)).sum(0)


def seq2seq(self: Any, given: Any) -> torch.Tensor:
    source, target = given
    memory = self.encoder(self.embed(source)[None])
    causal = nn.Transformer.generate_square_subsequent_mask(len(target))
    h = self.decoder(self.embed(target)[None], memory, tgt_mask=causal, tgt_is_causal=True)[0]
    return F.cross_entropy(self.predict(h[:-1]), target[1:]) if len(target) > 1 else h.sum() * 0


def cross_scores(self: Any, given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = given
    scores = self.l(a) @ b.T
    to_b = scores.softmax(1) @ b
    to_a = scores.softmax(0).T @ a
    best = scores.max(1)
    return self.out((to_b * best.values[:, None]).sum(0)), self.out(to_a.mean(0))


def colbert(self: Any, given: Any) -> torch.Tensor:
    a, b = given
    a, b = F.normalize(self.l(a), dim=-1), F.normalize(self.l(b), dim=-1)
    return torch.einsum("id,jd->ij", a, b).amax(1).sum()


def sag_pool(self: Any, g: Any) -> torch.Tensor:
    x, edges = g
    score = torch.tanh(self.score(x)).squeeze(-1)
    keep = (len(x) + 1) // 2
    _, order = score.sort(descending=True)
    chosen = order[:keep]
    h = x[chosen] * score[chosen].view(-1, 1)
    mask = torch.zeros(len(x), dtype=torch.bool)
    mask[chosen] = True
    near = (mask[edges[0]] & mask[edges[1]]).to(x.dtype).sum()
    return self.out(torch.cat([h.mean(0), h.amax(0)])) + near


def gat_v2(self: Any, g: Any) -> torch.Tensor:
    x, edges = g
    n, heads = x.size(0), 2
    loop = torch.arange(n).unsqueeze(0).repeat(2, 1)
    source, target = torch.cat([edges, loop], dim=1)
    left, right = self.l(x).view(n, heads, -1), self.r(x).view(n, heads, -1)
    e = F.leaky_relu(left[source] + right[target], 0.2)
    alpha = (e * self.att.view(1, heads, -1)).sum(-1)
    index = target.unsqueeze(-1).expand(-1, heads)
    top = alpha.new_full((n, heads), float("-inf")).scatter_reduce(0, index, alpha.detach(), "amax")
    power = (alpha - top[target]).exp()
    total = power.new_zeros(n, heads).scatter_add(0, index, power)[target]
    message = left[source] * (power / total).unsqueeze(-1)
    out = x.new_zeros(n, heads, D // heads)
    out = out.scatter_add(0, target.view(-1, 1, 1).expand_as(message), message)
    return self.out(F.elu(out.reshape(n, D)).mean(0))


def pna(self: Any, g: Any) -> torch.Tensor:
    x, (source, target) = g
    n = len(x)
    degree = torch.bincount(target, minlength=n).to(x.dtype).clamp(min=1)
    m = self.l(x)[source]
    total = x.new_zeros(n, D).index_add_(0, target, m)
    mean = total / degree[:, None]
    square = x.new_zeros(n, D).index_add_(0, target, m * m) / degree[:, None]
    std = (square - mean * mean).clamp(min=0).add(1e-5).sqrt()
    most = x.new_zeros(n, D).scatter_reduce_(0, target[:, None].expand_as(m), m, "amax", include_self=False)
    least = x.new_zeros(n, D).scatter_reduce_(0, target[:, None].expand_as(m), m, "amin", include_self=False)
    h = torch.cat([mean, std, most, least], -1)
    return self.out4(h * torch.log(degree + 1)[:, None]).mean(0)


def set2set(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = x.new_zeros(1, D)
    c = x.new_zeros(1, D)
    star = x.new_zeros(1, 2 * D)
    for _ in range(3):
        h, c = self.cell(star, (h, c))
        e = (x * h).sum(-1, keepdim=True)
        a = torch.softmax(e, dim=0)
        r = (a * x).sum(0, keepdim=True)
        star = torch.cat([h, r], -1)
    return self.out(star[0])


def deep_sets_standardised(self: Any, x: torch.Tensor) -> torch.Tensor:
    centred = (x - x.mean(0, keepdim=True)) / (x.std(0, unbiased=False, keepdim=True) + 1e-5)
    h = F.gelu(self.l(centred))
    return self.out(torch.cat([h.sum(0), h.mean(0), h.max(dim=0)[0]]))


def dynamic_graph(self: Any, x: torch.Tensor) -> torch.Tensor:
    near = torch.cdist(x[:, :3], x[:, :3])
    index = near.topk(2, largest=False, dim=-1).indices
    neighbours = x[index]
    edge = torch.cat([x.unsqueeze(1).expand_as(neighbours), neighbours - x.unsqueeze(1)], -1)
    return self.out(torch.relu(self.l2(edge)).max(1).values.mean(0))


def char_cnn(self: Any, given: Any) -> torch.Tensor:
    chars, word = given  # [T, 6], [T]
    c = self.chars(chars).transpose(1, 2)
    c = torch.relu(self.conv(c)).max(dim=-1)[0]
    h = torch.cat([c, self.embed(word)], dim=-1)
    h, _ = self.lstm(h.unsqueeze(0))
    return self.out(h.squeeze(0)).log_softmax(-1)


def span_scores(self: Any, x: torch.Tensor) -> torch.Tensor:
    t = len(x)
    h = torch.relu(self.l(x))
    start, end = self.r(h), self.s(h)
    table = self.o(torch.tanh(start[:, None, :] + end[None, :, :])).squeeze(-1)
    mask = torch.ones(t, t, dtype=torch.bool).triu()
    table = table.masked_fill(~mask, -1e9)
    return table.flatten().logsumexp(0) + table.diagonal().sum()


def arc_loss(self: Any, given: Any) -> torch.Tensor:
    x, heads = given
    h, d = torch.relu(self.l(x)), torch.relu(self.r(x))
    scores = torch.einsum("xi,ij,yj->xy", F.pad(d, (0, 1), value=1.0), self.u, h)
    scores = scores + torch.zeros_like(scores).fill_diagonal_(-1e4)
    return F.cross_entropy(scores, heads, reduction="sum")


def arcs_of(t: int) -> Any:
    t = max(t, 2)
    return rows(t), torch.randint(t, (t,))


def gold_score(self: Any, given: Any) -> torch.Tensor:
    x, tags = given
    emissions = self.out(x)
    score = emissions.gather(1, tags[:, None]).sum() + self.begin[tags[0]] + self.end[tags[-1]]
    return score + self.transitions[tags[:-1], tags[1:]].sum()


def tags_of(t: int) -> Any:
    return rows(t), torch.randint(K, (t,))


def hierarchical(self: Any, given: Any) -> torch.Tensor:
    tokens, sentence = given  # [T], [T] -> the sentence of each token
    h = self.gru(self.embed(tokens))[0]
    score = self.score(h).squeeze(-1)
    power = (score - score.max()).exp()
    total = x_sum(power, sentence, 3)
    weight = power / total[sentence]
    sentences = torch.zeros(3, h.shape[1], dtype=h.dtype).index_add(0, sentence, weight[:, None] * h)
    return self.out(sentences.mean(0))


def x_sum(x: torch.Tensor, index: torch.Tensor, n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=x.dtype).scatter_add(0, index, x)


def sentences_of(t: int) -> Any:
    return words(t), torch.randint(3, (t,)).sort()[0]


def conv_net(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = x.t().unsqueeze(0)
    h = torch.relu(self.c1(F.pad(h, (1, 1))))
    h = h + torch.relu(self.c2(h))
    return self.out(torch.cat([h.max(2)[0], h.mean(2)], 1)[0])


def causal_conv(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = x.transpose(0, 1)[None]
    for conv in self.convs:
        far = (conv.kernel_size[0] - 1) * conv.dilation[0]
        h = h + torch.tanh(conv(F.pad(h, (far, 0))))
    return self.out(h[0].t())[-1]


def gated_pooling(self: Any, x: torch.Tensor) -> torch.Tensor:
    a = torch.tanh(self.l(x)) * torch.sigmoid(self.r(x))
    a = F.softmax(self.score(a).transpose(1, 0), dim=1)
    return self.out(torch.mm(a, x)).squeeze(0)


def masked_mean(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.embed(x)
    mask = (x != 0).unsqueeze(-1).to(h.dtype)
    return self.out((h * mask).sum(0) / mask.sum(0).clamp(min=1e-9))


def first_order_model(self: Any, given: Any) -> torch.Tensor:
    x, times = given
    order = torch.argsort(times, stable=True)
    x, times = x[order], times[order]
    gap = torch.diff(times, prepend=times[:1])
    h = self.l(x) * torch.exp(-gap.abs())[:, None]
    return self.out(torch.cumsum(h, 0)[-1])


def timed(t: int) -> Any:
    return rows(t), torch.rand(t)


def energies(self: Any, given: Any) -> torch.Tensor:
    pos, kind = given
    h = self.embed(kind)
    delta = pos[:, None] - pos[None]
    far = (delta.pow(2).sum(-1) + torch.eye(len(pos), dtype=pos.dtype)).sqrt()
    rbf = torch.exp(-((far[..., None] - torch.linspace(0, 2, D, dtype=pos.dtype)) ** 2))
    other = 1 - torch.eye(len(pos), dtype=pos.dtype)
    message = (self.l(rbf) * h[None] * other[..., None]).sum(1)
    return self.out(torch.tanh(h + message)).sum(0)


def atoms(t: int) -> Any:
    return torch.randn(t, 3), words(t)


def listwise(self: Any, given: Any) -> torch.Tensor:
    x, relevance = given
    scores = self.out(torch.relu(self.l(x)))[:, 0]
    order = relevance.argsort(descending=True)
    sorted_scores = scores[order]
    tails = sorted_scores.flip(0).logcumsumexp(0).flip(0)
    return (tails - sorted_scores).sum() / len(x)


def pairwise_loss(self: Any, given: Any) -> torch.Tensor:
    x, relevance = given
    s = self.out(x)[:, 0]
    more = relevance[:, None] > relevance[None, :]
    loss = F.softplus(-(s[:, None] - s[None, :]))
    return torch.where(more, loss, torch.zeros_like(loss)).sum() / more.sum().clamp(min=1)


def windows(self: Any, x: torch.Tensor) -> torch.Tensor:
    padded = F.pad(x, (0, 0, 1, 1))
    near = padded.unfold(0, 3, 1).transpose(1, 2).flatten(1)
    return self.out(torch.relu(self.l3(near))).mean(0)


def local_attention(self: Any, x: torch.Tensor) -> torch.Tensor:
    t = len(x)
    place = torch.arange(t)
    allowed = (place[:, None] - place[None, :]).abs() <= 2
    h = F.scaled_dot_product_attention(*(y[None, None] for y in (self.l(x), x, x)), attn_mask=allowed)
    return self.out(h[0, 0]).sum(0)


def bert_like(self: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    mask = torch.ones_like(x)
    extended = (1.0 - mask[None, None, None, :].to(torch.get_default_dtype())) * -10000.0
    h = self.embed(x) + self.place.weight[: x.size(0)]
    t = h.size(0)
    q, k, v = (f(h).view(t, 2, -1).permute(1, 0, 2)[None] for f in (self.q, self.k, self.v))
    weight = nn.Softmax(dim=-1)(q @ k.transpose(-1, -2) / 2 + extended)
    h = self.norm(h + (weight @ v)[0].permute(1, 0, 2).reshape(t, -1))
    return {"last": h, "pooled": torch.tanh(self.out(h[0])), "cls": h[:1]}


def gru_attention_pool(self: Any, x: torch.Tensor) -> torch.Tensor:
    h, last = self.gru(x[:, None, :])
    h = h[:, 0]
    forward, backward = last[0, 0], last[1, 0]
    query = torch.cat([forward, backward])
    return self.out(F.softmax(h @ query / math.sqrt(len(query)), -1) @ h)


def diff_pool(self: Any, g: Any) -> torch.Tensor:
    x, edges = g
    n = x.shape[0]
    adjacency = torch.zeros(n, n, dtype=x.dtype)
    adjacency[edges[0], edges[1]] = 1.0
    s = torch.softmax(self.assign(x), dim=-1)
    h = s.t() @ torch.relu(self.l(adjacency @ x))
    link = (adjacency - s @ s.t()).pow(2).sum()
    entropy = (-s * torch.log(s + 1e-15)).sum(-1).mean()
    return self.out(h).sum(0) + link + entropy


def jumping(self: Any, g: Any) -> torch.Tensor:
    x, edges = g
    hs = [x]
    for layer in (self.l, self.r):
        m = torch.zeros_like(hs[-1]).index_add(0, edges[1], hs[-1][edges[0]])
        hs.append(torch.relu(layer(hs[-1] + m)))
    stacked = torch.stack(hs, dim=1)
    weight = torch.softmax(self.score(stacked).squeeze(-1), dim=-1)
    return self.out((stacked * weight.unsqueeze(-1)).sum(1)).amax(0)


def perceiver(self: Any, x: torch.Tensor) -> torch.Tensor:
    latents = self.latents
    for _ in range(2):
        q, k, v = self.q(latents), self.k(x), self.v(x)
        latents = latents + F.softmax(q @ k.mT * D**-0.5, -1) @ v
    return self.out(latents.mean(0))


def linear_attention(self: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = self.qkv(x).chunk(3, -1)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state = torch.einsum("td,te->tde", k, v).cumsum(0)
    norm = k.cumsum(0)
    top = torch.einsum("td,tde->te", q, state)
    return self.out(top / torch.einsum("td,td->t", q, norm)[:, None])


def mixer(self: Any, x: torch.Tensor) -> torch.Tensor:
    f = torch.fft.rfft(self.l(x), dim=-1)
    h = torch.view_as_real(f).flatten(1)
    return self.out10(h).mean(0)


def covariance(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.l(x)
    h = h - h.mean(0)
    c = h.T @ h / max(len(h) - 1, 1) + torch.eye(D, dtype=x.dtype)
    return self.out(torch.linalg.solve(c, x.mean(0))) + torch.logdet(c)


def kabsch(self: Any, given: Any) -> torch.Tensor:
    p, q = given
    p, q = p - p.mean(0), q - q.mean(0)
    turn = torch.linalg.qr(p.T @ q + torch.eye(3, dtype=p.dtype) * 5)[0]
    return ((p @ turn - q) ** 2).sum(-1).mean() * self.w


def points(t: int) -> Any:
    return torch.randn(t, 3), torch.randn(t, 3)


def adaptive_pool(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.l(x).T[None]
    return self.out(F.adaptive_avg_pool1d(h, 4).flatten()[:D])


def spp(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = x.T[None]
    pooled = [F.adaptive_max_pool1d(h, n).flatten() for n in (1, 2)]
    return self.l3(torch.cat(pooled))


def speech(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = self.c1(x.T[None])[0].T
    h = h[: len(h) // 2 * 2].reshape(len(h) // 2, 2 * D)
    return self.l2(h).log_softmax(-1)


def losses(self: Any, given: Any) -> dict[str, torch.Tensor]:
    x, y = given
    h = self.out(x)
    return {
        "nll": F.nll_loss(h.log_softmax(-1), y),
        "smooth": F.cross_entropy(h, y, label_smoothing=0.1),
        "each": F.cross_entropy(h, y, reduction="none"),
        "right": (h.argmax(-1) == y).to(h.dtype).mean(),
        "binary": F.binary_cross_entropy_with_logits(h[:, 0], (y == 0).to(h.dtype)),
        "huber": F.smooth_l1_loss(h[:, 1], y.to(h.dtype)),
        "kl": F.kl_div(h.log_softmax(-1), h.detach().softmax(-1), reduction="batchmean"),
    }


def select_by_mask(self: Any, given: Any) -> torch.Tensor:
    x, y = given
    return self.out(x)[y > 0].sum(0)


def where_rows(self: Any, given: Any) -> torch.Tensor:
    x, y = given
    h = torch.where((y > 0)[:, None], self.l(x), x)
    best = h.norm(dim=-1).argmax()
    return self.out(h[best] + h.gather(1, y[:, None]).sum())


def mean_by_kind(self: Any, given: Any) -> torch.Tensor:
    x, y = given
    which = F.one_hot(y, K).to(x.dtype)
    count = which.sum(0)
    mean = (which.T @ self.l(x)) / count.clamp(min=1).unsqueeze(1)
    return self.out(mean[y] - x).square().mean()


def prototypes(self: Any, given: Any) -> torch.Tensor:
    support, query = given
    h, q = self.l(support), self.l(query)
    far = torch.cdist(q, h).pow(2)
    weight = (-far).softmax(-1)
    return self.out(weight @ support).max(0).values


def interleaved_halves(self: Any, x: torch.Tensor) -> torch.Tensor:
    even, odd = x[::2], x[1::2]
    return self.out(even.sum(0) - self.l(odd).sum(0) + x[len(x) // 2])


def repeat_each(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = x.repeat_interleave(2, dim=0)
    again = x.repeat(2, 1)
    return self.out(torch.tanh(h * again)).sum(0)


def rolled(self: Any, x: torch.Tensor) -> torch.Tensor:
    around = torch.roll(x, 1, 0) + torch.roll(x, -1, 0)
    change = x[1:] - x[:-1]
    return self.out(self.l(around).mean(0)) + change.abs().sum()


def normalised_scores(self: Any, x: torch.Tensor) -> torch.Tensor:
    scores = self.l(x) @ x.t()
    scores = scores / scores.norm(dim=-1, keepdim=True).clamp(min=1e-3)
    scores = scores - scores.mean(dim=0)
    return self.out((scores.sigmoid() @ x).amin(0))


def sinkhorn(self: Any, given: Any) -> torch.Tensor:
    a, b = given
    log = -torch.cdist(self.l(a), b)
    for _ in range(3):
        log = log - log.logsumexp(1, keepdim=True)
        log = log - log.logsumexp(0, keepdim=True)
    return (log.exp() * torch.cdist(a, b)).sum()


def chamfer(self: Any, given: Any) -> torch.Tensor:
    a, b = given
    far = ((self.l(a).unsqueeze(1) - b.unsqueeze(0)) ** 2).sum(-1)
    return far.min(1).values.mean() + far.min(0)[0].mean()


def triangle(self: Any, x: torch.Tensor) -> torch.Tensor:
    pair_values = self.l(x)[:, None] * self.r(x)[None]
    out = torch.einsum("ikc,jkc->ijc", pair_values, torch.sigmoid(pair_values))
    return self.out(out.mean((0, 1)))


def beam_of_sizes(self: Any, given: Any) -> torch.Tensor:
    x, hypotheses = given  # [B, D] states, [B] scores
    logits = self.out(x).log_softmax(-1)
    total = (hypotheses[:, None] + logits).flatten()
    best, place = total.topk(2)
    return torch.cat([best, x[place // K].sum(1), (place % K).to(x.dtype)])


def beams(t: int) -> Any:
    return rows(t), torch.randn(t)


def batch_first_lstm(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, (h, c) = self.lstm(x.unsqueeze(0))
    return self.out(out[0, -1]), self.out(h[-1, 0] + c[-1, 0])


def moe(self: Any, x: torch.Tensor) -> torch.Tensor:
    gate = self.gate(x).softmax(-1)
    top, which = gate.topk(2, dim=-1)
    every = torch.stack([e(x) for e in self.experts], 1)
    mine = every.gather(1, which[..., None].expand(-1, -1, D))
    load = gate.mean(0)
    return self.out((top[..., None] * mine).sum(1)).sum(0) + (load * load).sum()


def memory_of_pairs(self: Any, given: Any) -> torch.Tensor:
    a, b = given
    both = torch.cat([a, b], 0)
    kind = torch.cat([torch.zeros(len(a), dtype=torch.long), torch.ones(len(b), dtype=torch.long)])
    h = self.encoder((both + self.kind(kind))[None])[0]
    return self.out(h[: len(a)].mean(0) - h[len(a) :].mean(0))


CASES: dict[str, Case] = {
    "learned positions": Case(
        learned_positions,
        lambda: {
            "embed": nn.Embedding(WORDS, D), "place": nn.Embedding(12, D), "norm": nn.LayerNorm(D),
            "encoder": encoder(), "out": nn.Linear(D, K),
        },
        words, MIXED,
    ),
    "rotary halves": Case(rotary_halves, lambda: {"qkv": nn.Linear(D, 3 * D), "out": nn.Linear(D, K)}, rows, MIXED),
    "T5 buckets": Case(t5_buckets, lambda: {**LINEAR(), "bias": nn.Embedding(8, 2)}, rows, MIXED),
    "sequence to sequence": Case(
        seq2seq,
        lambda: {
            "embed": nn.Embedding(WORDS, D), "encoder": encoder(), "predict": nn.Linear(D, WORDS),
            "decoder": nn.TransformerDecoderLayer(D, 2, 16, dropout=0.0, batch_first=True),
        },
        lambda t: (words(t), words((t * 3) % 5 + 2)), MIXED,
    ),
    "cross scores": Case(cross_scores, LINEAR, pair, MIXED),
    "ColBERT": Case(colbert, LINEAR, pair, MIXED),
    "SAG pooling": Case(sag_pool, lambda: {"score": nn.Linear(D, 1), "out": nn.Linear(2 * D, K)}, graph, MIXED),
    "GATv2": Case(gat_v2, lambda: {**LINEAR(), "r": nn.Linear(D, D), "att": parameter(D)}, graph, MIXED),
    "PNA": Case(pna, lambda: {**LINEAR(), "out4": nn.Linear(4 * D, K)}, graph, MIXED),
    "Set2Set": Case(set2set, lambda: {"cell": nn.LSTMCell(2 * D, D), "out": nn.Linear(2 * D, K)}, rows, WITH_NONE),
    "standardised sets": Case(
        deep_sets_standardised, lambda: {**LINEAR(), "out": nn.Linear(3 * D, K)}, rows, ((4, 7, 2, 5), (3, 2, 6)),
    ),
    "dynamic graph": Case(
        dynamic_graph, lambda: {"l2": nn.Linear(2 * D, D), "out": nn.Linear(D, K)}, rows, ((4, 7, 2, 5), (3, 2, 6)),
    ),
    "character CNN": Case(
        char_cnn,
        lambda: {
            "chars": nn.Embedding(30, D), "conv": nn.Conv1d(D, D, 3, padding=1), "embed": nn.Embedding(WORDS, D),
            "lstm": nn.LSTM(2 * D, D, batch_first=True, bidirectional=True), "out": nn.Linear(2 * D, K),
        },
        lambda t: (torch.randint(30, (t, 6)), words(t)), MIXED,
    ),
    "span scores": Case(
        span_scores, lambda: {**LINEAR(), "r": nn.Linear(D, D), "s": nn.Linear(D, D), "o": nn.Linear(D, 1)},
        rows, MIXED,
    ),
    "arc loss": Case(arc_loss, lambda: {**LINEAR(), "r": nn.Linear(D, D), "u": parameter(D + 1, D)}, arcs_of, MIXED),
    "CRF of given tags": Case(
        gold_score,
        lambda: {**LINEAR(), "begin": parameter(K), "end": parameter(K), "transitions": parameter(K, K)},
        tags_of, MIXED,
    ),
    "hierarchical": Case(
        hierarchical,
        lambda: {
            "embed": nn.Embedding(WORDS, D), "gru": nn.GRU(D, D), "score": nn.Linear(D, 1), "out": nn.Linear(D, K),
        },
        sentences_of, MIXED,
    ),
    "ConvNet": Case(
        conv_net,
        lambda: {"c1": nn.Conv1d(D, D, 3), "c2": nn.Conv1d(D, D, 3, padding=1), "out": nn.Linear(2 * D, K)},
        rows, MIXED,
    ),
    "causal convolutions": Case(
        causal_conv,
        lambda: {"convs": nn.ModuleList([nn.Conv1d(D, D, 2, dilation=d) for d in (1, 2, 4)]), "out": nn.Linear(D, K)},
        rows, MIXED,
    ),
    "gated pooling": Case(
        gated_pooling, lambda: {**LINEAR(), "r": nn.Linear(D, D), "score": nn.Linear(D, 1)}, rows, MIXED,
    ),
    "masked mean": Case(
        masked_mean, lambda: {"embed": nn.Embedding(WORDS, D, padding_idx=0), **LINEAR()}, words, WITH_NONE,
    ),
    "times": Case(first_order_model, LINEAR, timed, MIXED),
    "SchNet": Case(energies, lambda: {"embed": nn.Embedding(WORDS, D), **LINEAR()}, atoms, MIXED),
    "listwise": Case(listwise, LINEAR, timed, MIXED),
    "pairwise loss": Case(pairwise_loss, LINEAR, timed, MIXED),
    "windows": Case(windows, lambda: {"l3": nn.Linear(3 * D, D), **LINEAR()}, rows, MIXED),
    "local attention": Case(local_attention, LINEAR, rows, MIXED),
    "BERT": Case(
        bert_like,
        lambda: {
            "embed": nn.Embedding(WORDS, D), "place": nn.Embedding(12, D), "norm": nn.LayerNorm(D),
            "q": nn.Linear(D, D), "k": nn.Linear(D, D), "v": nn.Linear(D, D), "out": nn.Linear(D, D),
        },
        words, MIXED,
    ),
    "bidirectional GRU": Case(
        gru_attention_pool, lambda: {"gru": nn.GRU(D, D, bidirectional=True), "out": nn.Linear(2 * D, K)}, rows, MIXED,
    ),
    "DiffPool": Case(diff_pool, lambda: {**LINEAR(), "assign": nn.Linear(D, 3)}, graph, MIXED),
    "jumping knowledge": Case(
        jumping, lambda: {**LINEAR(), "r": nn.Linear(D, D), "score": nn.Linear(D, 1)}, graph, MIXED,
    ),
    "Perceiver": Case(
        perceiver,
        lambda: {
            "latents": parameter(4, D), "q": nn.Linear(D, D), "k": nn.Linear(D, D), "v": nn.Linear(D, D),
            "out": nn.Linear(D, K),
        },
        rows, WITH_NONE,
    ),
    "linear attention": Case(
        linear_attention, lambda: {"qkv": nn.Linear(D, 3 * D), "out": nn.Linear(D, K)}, rows, MIXED,
    ),
    "Fourier features": Case(mixer, lambda: {**LINEAR(), "out10": nn.Linear(10, K)}, rows, MIXED),
    "covariance": Case(covariance, LINEAR, rows, MIXED),
    "Kabsch": Case(kabsch, lambda: {"w": parameter(1)}, points, MIXED),
    "adaptive pooling": Case(adaptive_pool, LINEAR, rows, MIXED),
    "pyramid pooling": Case(spp, lambda: {"l3": nn.Linear(3 * D, K)}, rows, MIXED),
    "speech": Case(
        speech, lambda: {"c1": nn.Conv1d(D, D, 3, padding=1), "l2": nn.Linear(2 * D, K)}, rows,
        ((4, 7, 2, 5), (3, 2, 6)),
    ),
    "losses": Case(losses, LINEAR, tags_of, MIXED),
    "chosen by a mask": Case(select_by_mask, LINEAR, tags_of, MIXED),
    "where": Case(where_rows, LINEAR, tags_of, MIXED),
    "means by kind": Case(mean_by_kind, LINEAR, tags_of, MIXED),
    "prototypes": Case(prototypes, LINEAR, pair, MIXED),
    "halves": Case(interleaved_halves, LINEAR, rows, MIXED),
    "repeated": Case(repeat_each, LINEAR, rows, WITH_NONE),
    "rolled": Case(rolled, LINEAR, rows, MIXED),
    "normalised scores": Case(normalised_scores, LINEAR, rows, MIXED),
    "Sinkhorn": Case(sinkhorn, LINEAR, pair, MIXED),
    "Chamfer": Case(chamfer, LINEAR, pair, MIXED),
    "triangles": Case(triangle, lambda: {**LINEAR(), "r": nn.Linear(D, D)}, rows, MIXED),
    "a beam": Case(beam_of_sizes, LINEAR, beams, MIXED),
    "LSTM batch first": Case(
        batch_first_lstm, lambda: {"lstm": nn.LSTM(D, D, 2, batch_first=True), "out": nn.Linear(D, K)}, rows, MIXED,
    ),
    "mixture of experts": Case(
        moe,
        lambda: {
            "gate": nn.Linear(D, 3), "experts": nn.ModuleList([nn.Linear(D, D) for _ in range(3)]),
            "out": nn.Linear(D, K),
        },
        rows, MIXED,
    ),
    "two kinds in one": Case(
        memory_of_pairs, lambda: {"encoder": encoder(), "kind": nn.Embedding(2, D), "out": nn.Linear(D, K)}, pair,
        MIXED,
    ),
}  # fmt: skip
