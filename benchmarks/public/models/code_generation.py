"""Code from descriptions: a Child-Sum Tree-LSTM over the words, an LSTM decoder that attends to them and to its past.

Encoder and decoder of the repository, with its own dropout masks and random first states, on sentences of 5 to 12
words and 6 to 12 actions; hidden 128. A linear layer stands for its tables of actions. In eval mode it scores, too.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.public.model import Driver, Load, PublicModel
from benchmarks.public.sources import Edit, Source

WORDS, ACTIONS, HIDDEN = 400, 60, 128
RENAMED = r"init\.(orthogonal|xavier_uniform)\("

SOURCE = Source(
    "tsdaemon/treelstm-code-generation",
    "c99fbfbcbf70beb6164461a2344c69d12c9308f7",
    edits=(
        Edit("model/encoder.py", RENAMED, r"init.\1_(", "torch"),
        Edit("model/decoder.py", RENAMED, r"init.\1_(", "torch"),
        Edit("model/decoder.py", r"\.sum\(\)\[0\]", ".sum()", "torch"),
        Edit("model/decoder.py", r"^from lang\.\w+ import .*$", "", "import"),
    ),
)


def build(load: Load) -> Driver:
    encoders, decoders, trees = load("model.encoder"), load("model.decoder"), load("natural_lang.tree")
    config = SimpleNamespace(parent_hidden_state_feed=True, decoder_dropout=0.2, tree_attention=True)

    class Generator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.actions = nn.Embedding(WORDS, HIDDEN), nn.Embedding(ACTIONS, HIDDEN)
            self.encoder = encoders.ChildSumTreeLSTM(HIDDEN, HIDDEN, 0.2)
            self.decoder = decoders.CondAttLSTM(HIDDEN, HIDDEN, HIDDEN, HIDDEN, config)
            self.out = nn.Linear(HIDDEN, ACTIONS)

        def forward(self, tree: Any, words: Tensor, actions: Tensor, parents: Tensor) -> Tensor:
            h, c, context = self.encoder(tree, self.words(words))
            before = F.pad(actions[:, :-1], (1, 0))
            states, _ = self.decoder.forward_train(self.actions(before), context[None], h, c, parents)
            return F.cross_entropy(self.out(states[0]), actions[0])

    def instances(number: int, count: int) -> list[tuple[Any, ...]]:
        choose = random.Random(number)
        found = []
        for _ in range(count):
            length, steps = choose.randint(5, 12), choose.randint(6, 12)
            heads = [0, *(choose.randint(1, i) for i in range(1, length))]
            tree = trees.read_tree(" ".join(map(str, heads)))
            words = torch.tensor([choose.randrange(WORDS) for _ in range(length)])
            actions = torch.tensor([[choose.randrange(ACTIONS) for _ in range(steps)]])
            parents = torch.tensor([[choose.randrange(max(t, 1)) for t in range(steps)]])
            found.append((tree, words, actions, parents))
        return found

    return Driver(Generator, instances)


MODEL = PublicModel("code generation", "semantic parser", SOURCE, build)
