"""Words to numbers: a vocabulary, and trees and sentences whose words are 0-dim int64 tensors.

    vocabulary = Vocabulary.build(leaf.word for tree in trees for leaf in tree.leaves())
    encoded = [vocabulary.encode_tree(tree) for tree in trees]
    encoded[0].left.word               # tensor(17)

Each entry has ONE tensor, made once: equal words are the same tensor object, so that a minibatch has one
constant a word, not one an occurrence.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from fxbatch.data.sst import Tree

UNKNOWN = "<unk>"


class Vocabulary:
    """Words numbered from 0; entry 0 stands for every word that is not in it."""

    def __init__(self, words: Sequence[str], *, device: torch.device | str = "cpu") -> None:
        """`words` in order of their numbers; the first is the unknown word. Tensors live on `device`."""
        self.words = tuple(words)
        self.device = torch.device(device)
        self._index = {word: i for i, word in enumerate(self.words)}
        if len(self._index) != len(self.words) or not self.words:
            raise ValueError("a vocabulary has at least the unknown word, and each word once")

    @classmethod
    def build(
        cls,
        words: Iterable[str],
        *,
        min_count: int = 1,
        lower: bool = False,
        device: torch.device | str = "cpu",
    ) -> Vocabulary:
        """The words that occur `min_count` times or more, the most frequent first, ties by the alphabet."""
        counts = Counter(word.lower() if lower else word for word in words)
        counts.pop(UNKNOWN, None)
        kept = sorted((w for w, n in counts.items() if n >= min_count), key=lambda w: (-counts[w], w))
        return cls([UNKNOWN, *kept], device=device)

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: str) -> bool:
        return word in self._index

    def number(self, word: str) -> int:
        """The number of a word, or that of its lower-case form, or 0."""
        found = self._index.get(word)
        if found is None:
            found = self._index.get(word.lower(), 0)
        return found

    @functools.cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """One 0-dim int64 tensor an entry."""
        return number_tensors(len(self), self.device)

    def tensor(self, word: str) -> torch.Tensor:
        """The 0-dim int64 tensor of a word; the same object for equal words."""
        return self.tensors[self.number(word)]

    def encode(self, words: Iterable[str]) -> list[torch.Tensor]:
        """A sentence as 0-dim int64 tensors."""
        return [self.tensor(word) for word in words]

    def encode_tree(self, tree: Tree[int, str]) -> Tree[torch.Tensor, torch.Tensor]:
        """A tree with words and labels as int64 tensors without dimensions."""
        stack: list[Tree[torch.Tensor, torch.Tensor]] = []
        labels = label_tensors(self.device)
        for node in tree.postorder():
            if node.left is None:
                stack.append(Tree(labels[node.label], self.tensor(node.word or "")))
            else:
                right = stack.pop()
                stack.append(Tree(labels[node.label], None, stack.pop(), right))
        return stack.pop()


@functools.lru_cache(maxsize=8)
def label_tensors(device: torch.device) -> tuple[torch.Tensor, ...]:
    """One 0-dim int64 tensor a label, the same objects for all trees of a device."""
    return number_tensors(256, device)


def number_tensors(count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """`tensor(0), tensor(1), ...`: separate tensors, since a view would be pickled with all its siblings."""
    if device.type == "cpu":
        return tuple(torch.tensor(i) for i in range(count))
    # One copy to the device, then one clone each there.
    return tuple(row.clone() for row in torch.arange(count).to(device).unbind())
