"""Recurrent language model over ragged sentences, written for ONE sentence.

In: a sentence, as word ids from <start> to <end>. Out: the negative log likelihood of its words.
No padding and no buckets: sentences of all lengths share their steps. UD English Web Treebank; perplexity.

    model, sentences = minibatch()
    losses = model(sentences)            # a list of sentences in, [sentences] out
    losses.sum().backward()
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from fxbatch_examples.command import device, positive, run
from rich.progress import track
from torch import Tensor, nn

import fxbatch
from fxbatch.data.conllu import read_conllu
from fxbatch.data.paths import file_in, find_data
from fxbatch.data.vocabulary import Vocabulary

START, END = "<start>", "<end>"
Sentence = Sequence[Tensor]  # word ids without dimensions


class LanguageModel(nn.Module):
    """An LSTM that predicts each word from those before it; embeddings and scores share one table."""

    def __init__(self, words: int, *, hidden: int = 200, layers: int = 1):
        super().__init__()
        self.embed = nn.Embedding(words, hidden)
        self.cells = nn.ModuleList(nn.LSTMCell(hidden, hidden) for _ in range(layers))
        self.bias = nn.Parameter(torch.zeros(words))
        nn.init.normal_(self.embed.weight, std=0.1)

    @fxbatch.autobatch
    def forward(self, sentence: Sentence) -> Tensor:
        """The negative log likelihood of a sentence in nats: no dimensions."""
        states: list[tuple[Tensor, Tensor] | None] = [None] * len(self.cells)
        losses = []
        for word, following in itertools.pairwise(sentence):
            vector = self.embed(word)
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(vector, states[layer])
                vector = states[layer][0]
            losses.append(F.cross_entropy(F.linear(vector, self.embed.weight, self.bias), following))
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total


def build(words: int, *, hidden: int = 200, layers: int = 1) -> LanguageModel:
    """The model."""
    return LanguageModel(words, hidden=hidden, layers=layers)


def minibatch(*, sentences: int = 8, hidden: int = 8, seed: int = 0) -> tuple[LanguageModel, list[Sentence]]:
    """A small model and random sentences of 2 to 9 ids."""
    torch.manual_seed(seed)
    lengths = [int(n) for n in torch.randint(2, 10, (sentences,))]
    return build(20, hidden=hidden), [torch.randint(0, 20, (n,)).unbind() for n in lengths]


@torch.no_grad()
def perplexity(model: LanguageModel, sentences: Sequence[Sentence], batch_size: int) -> float:
    """exp of the mean negative log likelihood of a word, <end> included."""
    nats = 0.0
    for start in range(0, len(sentences), batch_size):
        nats += model(sentences[start : start + batch_size]).sum().item()
    return math.exp(nats / sum(len(sentence) - 1 for sentence in sentences))


def main(argv: Sequence[str] | None = None) -> float:
    """Train on the sentences of EWT; dev perplexity after each epoch, the last one returned."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", help="folder that holds ud_ewt/")
    parser.add_argument("--epochs", type=positive, default=3)
    parser.add_argument("--limit", type=positive, help="train on the first LIMIT sentences, test on as many")
    parser.add_argument("--batch-size", type=positive, default=64)
    parser.add_argument("--hidden", type=positive, default=200)
    parser.add_argument("--device", type=device, default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disabled", action="store_true", help="one sentence at a time, undecorated")
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    shuffle = random.Random(args.seed)

    folder = find_data("ud_ewt", args.data)
    files = [file_in(folder, f"en_ewt-ud-{part}.conllu") for part in ("train", "dev")]
    parts = [[[t.form.lower() for t in s.tokens] for s in read_conllu(path)[: args.limit]] for path in files]
    counts = Counter(form for sentence in parts[0] for form in sentence)
    kept = [form for form, count in counts.most_common() if count > 2]
    words = Vocabulary(["<unk>", START, END, *kept], device=args.device)
    train, dev = ([words.encode([START, *sentence, END]) for sentence in part] for part in parts)
    model = build(len(words), hidden=args.hidden).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    found = math.inf
    with fxbatch.disabled() if args.disabled else contextlib.nullcontext():
        for epoch in range(1, args.epochs + 1):
            shuffle.shuffle(train)
            batches = [train[i : i + args.batch_size] for i in range(0, len(train), args.batch_size)]
            total = 0.0
            for batch in track(batches, description=f"epoch {epoch}"):
                loss = model(batch).sum()
                optimizer.zero_grad()
                (loss / len(batch)).backward()
                optimizer.step()
                total += loss.item()
            found = perplexity(model, dev, args.batch_size)
            print(f"epoch {epoch}: loss a sentence {total / len(train):.3f}, dev perplexity {found:.1f}")
    return found


if __name__ == "__main__":
    run(main)
