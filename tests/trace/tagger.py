"""A BiLSTM-CRF as PyTorch's tutorial of it is written: loops over words and tags, a dictionary, views."""

from __future__ import annotations

import torch
from torch import nn

import fxbatch

START, STOP = "<START>", "<STOP>"
TAGS = {"B": 0, "I": 1, "O": 2, START: 3, STOP: 4}


def log_sum_exp(vec: torch.Tensor) -> torch.Tensor:
    max_score = vec.max(1)[0].view(1, -1)
    max_score_broadcast = max_score.view(1, -1).expand(1, vec.size()[1])
    return max_score + torch.log(torch.sum(torch.exp(vec - max_score_broadcast))).view(1)


class CRF(nn.Module):
    """Transitions between tags, and the loss of a sentence's."""

    def __init__(self, tag_to_ix: dict[str, int]) -> None:
        super().__init__()
        self.tag_to_ix = tag_to_ix
        self.tagset_size = len(tag_to_ix)
        self.transitions = nn.Parameter(torch.randn(self.tagset_size, self.tagset_size))
        self.transitions.data[tag_to_ix[START], :] = -10000
        self.transitions.data[:, tag_to_ix[STOP]] = -10000

    def _forward_alg(self, feats: torch.Tensor) -> torch.Tensor:
        init_alphas = torch.full((1, self.tagset_size), -10000.0, dtype=feats.dtype)
        init_alphas[0][self.tag_to_ix[START]] = 0.0
        forward_var = init_alphas
        for feat in feats:
            alphas_t = []
            for next_tag in range(self.tagset_size):
                emit_score = feat[next_tag].view(1, -1).expand(1, self.tagset_size)
                trans_score = self.transitions[next_tag].view(1, -1)
                next_tag_var = forward_var + trans_score + emit_score
                alphas_t.append(log_sum_exp(next_tag_var).view(1))
            forward_var = torch.cat(alphas_t).view(1, -1)
        terminal_var = forward_var + self.transitions[self.tag_to_ix[STOP]]
        return log_sum_exp(terminal_var)

    def _score_sentence(self, feats: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        score = torch.zeros(1, dtype=feats.dtype)
        tags = torch.cat([torch.tensor([self.tag_to_ix[START]], dtype=torch.long), tags])
        for i, feat in enumerate(feats):
            score = score + self.transitions[tags[i + 1], tags[i]] + feat[tags[i + 1]]
        return score + self.transitions[self.tag_to_ix[STOP], tags[-1]]

    def forward(self, feats: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        return self._forward_alg(feats) - self._score_sentence(feats, tags)


class Tagger(nn.Module):
    """Words, a BiLSTM, a CRF."""

    def __init__(self, words: int = 50, width: int = 5, hidden: int = 4) -> None:
        super().__init__()
        self.hidden_dim = hidden
        self.word_embeds = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, hidden // 2, num_layers=1, bidirectional=True)
        self.hidden2tag = nn.Linear(hidden, len(TAGS))
        self.crf = CRF(TAGS)

    def features(self, sentence: torch.Tensor) -> torch.Tensor:
        embeds = self.word_embeds(sentence).view(len(sentence), 1, -1)
        lstm_out, _ = self.lstm(embeds)
        return self.hidden2tag(lstm_out.view(len(sentence), self.hidden_dim))

    @fxbatch.autobatch(adaptive=False, out="list")
    def forward(self, sentence: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        return self.crf(self.features(sentence), tags)


def sentences(n: int, longest: int = 11) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Words and tags of n sentences."""
    lengths = [1 + (7 * i) % longest for i in range(1, n + 1)]
    return [torch.randint(50, (t,)) for t in lengths], [torch.randint(3, (t,)) for t in lengths]
