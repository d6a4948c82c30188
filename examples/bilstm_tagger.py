"""BiLSTM part-of-speech tagger, written for ONE sentence as a plain loop over its words.

In: a sentence, as a list of word ids (tensors without dimensions). Out: scores of the tags, one tensor per word.
Two layers of 256 a direction over embeddings of 200, as in Neubig et al. 2017, figure 2; trained on the UD
English Web Treebank (universal part-of-speech tags).

    model, sentences = minibatch()
    scores = model(sentences)            # a list of sentences in, a list of lists of scores out
    model.loss(sentences).sum().backward()
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from fxbatch_examples.command import (
    add_checkpoint,
    in_batches,
    keep,
    loop_if,
    positive,
    resume,
    run,
    train_epoch,
    training_options,
)
from torch import Tensor, nn

import fxbatch
from fxbatch.data.conllu import Sentence as Tagged
from fxbatch.data.conllu import read_conllu
from fxbatch.data.paths import file_in, find_data
from fxbatch.data.vocabulary import Vocabulary


@dataclass(frozen=True)
class Sentence:
    """Word ids and tag ids, each a tensor without dimensions."""

    words: Sequence[Tensor]
    tags: Sequence[Tensor]


class Tagger(nn.Module):
    """Scores the tags of one sentence: embeddings, BiLSTM layers, one linear layer."""

    def __init__(self, words: int, tags: int, *, embedding: int = 200, hidden: int = 256, layers: int = 2):
        super().__init__()
        widths = [embedding] + [2 * hidden] * (layers - 1)
        self.embed = nn.Embedding(words, embedding)
        self.left_to_right = nn.ModuleList(nn.LSTMCell(width, hidden) for width in widths)
        self.right_to_left = nn.ModuleList(nn.LSTMCell(width, hidden) for width in widths)
        self.out = nn.Linear(2 * hidden, tags)

    def scores(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Vectors `[embedding]` of the words to scores `[tags]` of each."""
        for forth, back in zip(self.left_to_right, self.right_to_left, strict=True):
            left = states(forth, vectors)
            right = states(back, vectors[::-1])[::-1]
            vectors = [torch.cat(pair) for pair in zip(left, right, strict=True)]
        return [self.out(vector) for vector in vectors]

    @fxbatch.autobatch(out="list")
    def forward(self, sentence: Sentence) -> list[Tensor]:
        """Scores `[tags]` of each word."""
        return self.scores([self.embed(word) for word in sentence.words])

    @fxbatch.autobatch
    def loss(self, sentence: Sentence) -> Tensor:
        """Cross entropy, summed over the words: no dimensions."""
        scores = self.scores([self.embed(word) for word in sentence.words])
        return sum_losses(scores, sentence.tags)


def states(cell: nn.Module, vectors: Sequence[Tensor]) -> list[Tensor]:
    """The hidden states `[hidden]` of an LSTM cell after each vector."""
    state, hidden = None, []
    for vector in vectors:
        state = cell(vector, state)
        hidden.append(state[0])
    return hidden


def sum_losses(scores: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """The cross entropies of scores `[classes]` and classes, summed."""
    total = F.cross_entropy(scores[0], targets[0])
    for score, target in zip(scores[1:], targets[1:], strict=True):
        total = total + F.cross_entropy(score, target)
    return total


def build(words: int, tags: int, *, embedding: int = 200, hidden: int = 256, layers: int = 2) -> Tagger:
    """The model, at the paper's sizes unless told otherwise."""
    return Tagger(words, tags, embedding=embedding, hidden=hidden, layers=layers)


def minibatch(*, sentences: int = 8, hidden: int = 16, seed: int = 0) -> tuple[Tagger, list[Sentence]]:
    """A small model and random sentences of 1 to 9 words."""
    torch.manual_seed(seed)
    lengths = [int(n) for n in torch.randint(1, 10, (sentences,))]
    instances = [
        Sentence(torch.randint(0, 50, (n,)).unbind(), torch.randint(0, 5, (n,)).unbind()) for n in lengths
    ]
    return build(50, 5, embedding=12, hidden=hidden), instances


def encode(sentence: Tagged, words: Vocabulary, tags: Vocabulary) -> Sentence:
    """Forms and universal tags as numbers."""
    return Sentence(
        words.encode(t.form for t in sentence.tokens), tags.encode(t.upos for t in sentence.tokens)
    )


@torch.no_grad()
def accuracy(model: Tagger, sentences: Sequence[Sentence], batch_size: int) -> float:
    """The share of words whose best tag is the right one."""
    right = words = 0
    for batch in in_batches(sentences, batch_size):
        for sentence, scores in zip(batch, model(batch), strict=True):
            best = torch.stack(list(scores)).argmax(1)
            right += int((best == torch.stack(list(sentence.tags))).sum())
            words += len(sentence.tags)
    return right / words


def main(argv: Sequence[str] | None = None) -> float:
    """Train on EWT; the accuracy on its dev sentences after each epoch, the last one returned."""
    options = training_options(main.__doc__, "ud_ewt", epochs=3)
    options.add_argument("--hidden", type=positive, default=256)
    add_checkpoint(options)
    args = options.parse_args(argv)
    torch.manual_seed(args.seed)
    shuffle = random.Random(args.seed)

    folder = find_data("ud_ewt", args.data)
    raw, raw_dev = (
        read_conllu(file_in(folder, f"en_ewt-ud-{part}.conllu"))[: args.limit] for part in ("train", "dev")
    )
    words = Vocabulary.build((t.form for s in raw for t in s.tokens), min_count=2, device=args.device)
    tags = Vocabulary.build((t.upos for s in raw for t in s.tokens), device=args.device)
    train, dev = ([encode(sentence, words, tags) for sentence in part] for part in (raw, raw_dev))
    model = build(len(words), len(tags), hidden=args.hidden).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), args.rate)
    found = 0.0
    done = resume(args.checkpoint, args, model, optimizer)
    if done >= args.epochs:
        found = accuracy(model, dev, args.batch_size)
    with loop_if(args.disabled):
        for epoch in range(1, args.epochs + 1):
            shuffle.shuffle(train)
            if epoch <= done:
                continue
            mean, seconds = train_epoch(epoch, in_batches(train, args.batch_size), model.loss, optimizer)
            keep(args.checkpoint, epoch, args, model, optimizer)
            found = accuracy(model, dev, args.batch_size)
            print(f"epoch {epoch}: loss a sentence {mean:.3f}, dev accuracy {found:.2%}, {seconds:.0f} s")
    return found


if __name__ == "__main__":
    run(main)
