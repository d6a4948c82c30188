"""Taggers batched by hand: padded and packed `nn.LSTM`, in plain PyTorch with autograd.

In: sentences of the examples' taggers. Out: scores of all words, or the summed loss. The LSTMs have their own
parameters, copied from the model's cells (fused kernels want them in one piece); `gradients()` gives theirs
under the model's names.

    hand = PackedTagger(model)
    hand.loss(sentences).backward()
    hand.gradients()["left_to_right.0.weight_ih"]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence, unpack_sequence

from examples.bilstm_tagger import Sentence, Tagger
from examples.char_tagger import CharTagger
from examples.char_tagger import Sentence as SpelledSentence

PARTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


class PackedBiLSTM(nn.Module):
    """Layers of two directions each, with the parameters of LSTM cells."""

    def __init__(
        self, forth: Sequence[tuple[str, nn.LSTMCell]], back: Sequence[tuple[str, nn.LSTMCell]]
    ) -> None:
        super().__init__()
        first = forth[0][1]
        self.lstm = nn.LSTM(first.input_size, first.hidden_size, len(forth), bidirectional=True)
        self.lstm.to(first.weight_ih.device, first.weight_ih.dtype)
        self.names: dict[str, str] = {}
        for cells, suffix in ((forth, ""), (back, "_reverse")):
            for layer, (name, cell) in enumerate(cells):
                for part in PARTS:
                    own = f"{part}_l{layer}{suffix}"
                    self.names[own] = f"{name}.{part}"
                    with torch.no_grad():
                        getattr(self.lstm, own).copy_(getattr(cell, part))

    def forward(self, packed: PackedSequence) -> tuple[PackedSequence, Tensor]:
        """The states of both directions, packed; the last layer's final states `[sequences, 2 * hidden]`."""
        states, (last, _) = self.lstm(packed)
        return states, torch.cat([last[-2], last[-1]], 1)

    def gradients(self) -> dict[str, Tensor | None]:
        """Gradients under the names of the cells' parameters."""
        return {name: getattr(self.lstm, own).grad for own, name in self.names.items()}


class PackedTagger(nn.Module):
    """`examples.bilstm_tagger.Tagger` by hand: embedding and output layer are the model's own."""

    def __init__(self, model: Tagger) -> None:
        super().__init__()
        self.embed, self.out = model.embed, model.out
        forth = [(f"left_to_right.{i}", cell) for i, cell in enumerate(model.left_to_right)]
        back = [(f"right_to_left.{i}", cell) for i, cell in enumerate(model.right_to_left)]
        self.bilstm = PackedBiLSTM(forth, back)

    def scores(self, sentences: Sequence[Sentence]) -> PackedSequence:
        """Scores `[words, tags]` of all words, packed."""
        words = pack_sequence([torch.stack(list(s.words)) for s in sentences], enforce_sorted=False)
        states, _ = self.bilstm(words._replace(data=self.embed(words.data)))
        return states._replace(data=self.out(states.data))

    def forward(self, sentences: Sequence[Sentence]) -> list[Tensor]:
        """Scores `[words, tags]` of each sentence."""
        return unpack_sequence(self.scores(sentences))

    def loss(self, sentences: Sequence[Sentence]) -> Tensor:
        """The sum of the losses of all words: no dimensions."""
        tags = pack_sequence([torch.stack(list(s.tags)) for s in sentences], enforce_sorted=False)
        return F.cross_entropy(self.scores(sentences).data, tags.data, reduction="sum")

    def gradients(self) -> dict[str, Tensor | None]:
        """Gradients under the model's names."""
        return own_gradients(self, "bilstm") | self.bilstm.gradients()


class PaddedTagger(PackedTagger):
    """A PackedTagger with the scores and tags of a minibatch as padded rectangles, masked in the loss."""

    def loss(self, sentences: Sequence[Sentence]) -> Tensor:
        scores, _ = pad_packed_sequence(self.scores(sentences))
        tags = nn.utils.rnn.pad_sequence([torch.stack(list(s.tags)) for s in sentences], padding_value=-100)
        return F.cross_entropy(scores.flatten(0, 1), tags.flatten(), reduction="sum", ignore_index=-100)


class PackedCharTagger(nn.Module):
    """`examples.char_tagger.CharTagger` by hand: one packed LSTM spells all rare words."""

    def __init__(self, model: CharTagger) -> None:
        super().__init__()
        self.embed, self.character, self.out = model.embed, model.character, model.out
        self.spell = PackedBiLSTM([("spell_forth", model.spell_forth)], [("spell_back", model.spell_back)])
        self.bilstm = PackedBiLSTM(
            [("left_to_right", model.left_to_right)], [("right_to_left", model.right_to_left)]
        )

    def vectors(self, sentences: Sequence[SpelledSentence]) -> Tensor:
        """Vectors `[words, embedding]` of all words, sentence after sentence."""
        words = [word for sentence in sentences for word in sentence.words]
        known = [i for i, word in enumerate(words) if word.id is not None]
        rare = [i for i, word in enumerate(words) if word.id is None]
        parts = []
        if known:
            parts.append(self.embed(torch.stack([word.id for word in words if word.id is not None])))
        if rare:
            letters = pack_sequence(
                [torch.stack(list(words[i].characters)) for i in rare], enforce_sorted=False
            )
            parts.append(self.spell(letters._replace(data=self.character(letters.data)))[1])
        order = torch.empty(len(words), dtype=torch.long)
        order[torch.tensor(known + rare)] = torch.arange(len(words))
        return torch.cat(parts).index_select(0, order.to(parts[0].device))

    def loss(self, sentences: Sequence[SpelledSentence]) -> Tensor:
        """The sum of the losses of all words: no dimensions."""
        vectors = self.vectors(sentences).split([len(sentence.words) for sentence in sentences])
        states, _ = self.bilstm(pack_sequence(vectors, enforce_sorted=False))
        tags = pack_sequence([torch.stack(list(s.tags)) for s in sentences], enforce_sorted=False)
        return F.cross_entropy(self.out(states.data), tags.data, reduction="sum")

    def gradients(self) -> dict[str, Tensor | None]:
        """Gradients under the model's names."""
        own = own_gradients(self, "bilstm", "spell")
        return own | self.bilstm.gradients() | self.spell.gradients()


def own_gradients(module: nn.Module, *without: str) -> dict[str, Tensor | None]:
    """Gradients of the parameters outside the children named."""
    named = module.named_parameters()
    return {name: p.grad for name, p in named if name.partition(".")[0] not in without}
