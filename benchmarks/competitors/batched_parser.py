"""The transition-based parser batched by hand: all sentences of a minibatch take a transition at a time.

In: sentences of the example. Out: the summed loss. Encoding is a packed LSTM; each round gathers four rows a
sentence from one table of all vectors, scores them together and copies the scores to the host once.

    hand = BatchedParser(model)              # LSTM parameters of its own, the rest shared
    hand.loss(sentences).backward()
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from benchmarks.competitors.packed_lstm import PackedBiLSTM, own_gradients
from examples.parser import Configuration, Parse, Parser, Sentence, mask_number


class BatchedParser(nn.Module):
    """The model by hand; oracle, exploration and transitions are the model's own."""

    def __init__(self, model: Parser) -> None:
        super().__init__()
        self.model = model
        forth = [(f"left_to_right.{i}", cell) for i, cell in enumerate(model.left_to_right)]
        back = [(f"right_to_left.{i}", cell) for i, cell in enumerate(model.right_to_left)]
        self.bilstm = PackedBiLSTM(forth, back)

    def encode(
        self, sentences: Sequence[Sentence], chances: Sequence[random.Random] | None
    ) -> tuple[Tensor, list[int]]:
        """Rows `[words + roots + 1, 2 * hidden]` of all sentences and of a missing word; first rows."""
        model = self.model
        words, tags = [], []
        for i, sentence in enumerate(sentences):
            for word, tag in zip(sentence.words, sentence.tags, strict=True):
                hide = chances is not None and chances[i].random() < model.word_dropout
                words.append(model.first if hide else word)
                tags.append(tag)
        table = torch.cat([model.word(torch.stack(words)), model.tag(torch.stack(tags))], 1)
        lengths = [len(sentence.words) for sentence in sentences]
        root = model.root(model.first.view(1))
        packed = pack_sequence(
            [torch.cat([rows, root]) for rows in table.split(lengths)], enforce_sorted=False
        )
        rows = unpack_sequence(self.bilstm(packed)[0])
        first = [0]
        for length in lengths:
            first.append(first[-1] + length + 1)
        return torch.cat([*rows, model.missing(model.first.view(1))]), first

    def scores(
        self, table: Tensor, first: Sequence[int], live: Sequence[int], states: Sequence[Configuration]
    ) -> Tensor:
        """Scores `[live, actions]` of the configurations that are not done."""
        missing = len(table) - 1
        places = []
        for i in live:
            stack = states[i].stack[-3:]
            places += [missing] * (3 - len(stack)) + [first[i] + word for word in stack]
            places.append(first[i] + states[i].buffer)
        rows = table.index_select(0, torch.tensor(places, device=table.device))
        return self.model.classify.score(rows.view(len(live), -1))

    def loss(self, sentences: Sequence[Sentence]) -> Tensor:
        """The sum of the hinge losses: no dimensions."""
        model = self.model
        chances = [random.Random(s.number * 1_000_003 + model.round) for s in sentences]
        table, first = self.encode(sentences, chances)
        states = [Configuration(len(sentence.words)) for sentence in sentences]
        gold = [[head - 1 if head else len(s.words) for head in s.heads] for s in sentences]
        live = list(range(len(sentences)))
        total = table.new_zeros(())
        while live:
            scores = self.scores(table, first, live, states)
            rights, wrongs = [], []
            for row, (i, values) in enumerate(zip(live, scores.tolist(), strict=True)):
                right, wrong = model.judge(states[i], gold[i], sentences[i].relations, values)
                margin = values[right] - values[wrong] if wrong is not None else 2.0
                if margin < 1:
                    rights.append(row * scores.shape[1] + right)
                    wrongs.append(row * scores.shape[1] + wrong)
                explore = margin < 0 or (margin < 1 and chances[i].random() < 0.1)
                states[i].take(*model.actions[wrong if explore and wrong is not None else right][1:])
            if rights:
                picked = scores.flatten().index_select(0, torch.tensor(rights + wrongs, device=scores.device))
                right_scores, wrong_scores = picked.view(2, -1)
                total = total + (1 - right_scores + wrong_scores).sum()
            live = [i for i in live if not states[i].done]
        return total

    @torch.no_grad()
    def forward(self, sentences: Sequence[Sentence]) -> list[Parse]:
        """The parse that taking the best legal action each time gives, for each sentence."""
        model = self.model
        table, first = self.encode(sentences, None)
        states = [Configuration(len(sentence.words)) for sentence in sentences]
        live = list(range(len(sentences)))
        while live:
            masks = model.illegal[[mask_number(states[i]) for i in live]]
            best = (self.scores(table, first, live, states) + masks).argmax(1).tolist()
            for i, action in zip(live, best, strict=True):
                states[i].take(*model.actions[action][1:])
            live = [i for i in live if not states[i].done]
        return [state.parse() for state in states]

    def gradients(self) -> dict[str, Tensor | None]:
        """Gradients under the model's names."""
        named = own_gradients(self.model, "left_to_right", "right_to_left")
        return named | self.bilstm.gradients()
