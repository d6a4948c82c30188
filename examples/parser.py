"""Transition-based dependency parser, written for ONE sentence as a plain loop that takes the best action.

In: a sentence, as word and part-of-speech ids. Out: the head and the relation of each word.
Arc-hybrid transitions over BiLSTM vectors, trained with a dynamic oracle and exploration, as in Kiperwasser &
Goldberg 2016 (the parser of Neubig et al. 2017, table 1); UD English Web Treebank. Each action depends on the
scores before it, so the loop asks for values; all parsers of a minibatch advance together.

    model, sentences = minibatch()
    parses = model(sentences)            # [Parse(heads=[2, 0, 2], relations=[1, 0, 3]), ...]
    model.loss(sentences).sum().backward()
"""

from __future__ import annotations

import argparse
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
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
from fxbatch.data.conllu import read_conllu
from fxbatch.data.paths import file_in, find_data
from fxbatch.data.vocabulary import Vocabulary


@dataclass(frozen=True)
class Sentence:
    """Word and tag ids (tensors without dimensions); gold heads (1-based, 0 = root) and relation ids."""

    words: Sequence[Tensor]
    tags: Sequence[Tensor]
    heads: Sequence[int]
    relations: Sequence[int]
    number: int = 0  # seeds what is drawn for this sentence


@dataclass(frozen=True)
class Parse:
    """The head (1-based, 0 = root) and the relation id of each word."""

    heads: list[int]
    relations: list[int]


SHIFT, LEFT, RIGHT = "shift", "left", "right"


@dataclass
class Configuration:
    """A state of the arc-hybrid system: words 0 .. n-1, the root is n and stands last in the buffer."""

    words: int
    stack: list[int] = field(default_factory=list)
    buffer: int = 0  # words buffer .. n wait
    heads: dict[int, int] = field(default_factory=dict)
    relations: dict[int, int] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether only the root is left."""
        return not self.stack and self.buffer == self.words

    def parse(self) -> Parse:
        """The parse of a configuration that is done."""
        heads = [(self.heads[word] + 1) % (self.words + 1) for word in range(self.words)]
        return Parse(heads, [self.relations[word] for word in range(self.words)])

    def legal(self) -> list[str]:
        """The transitions that can be taken here."""
        allowed = [SHIFT] if self.buffer < self.words else []
        allowed += [LEFT] if self.stack else []
        return allowed + ([RIGHT] if len(self.stack) > 1 else [])

    def take(self, transition: str, relation: int = 0) -> None:
        """SHIFT moves a word to the stack; LEFT and RIGHT attach the top to the next word, the one below."""
        if transition == SHIFT:
            self.stack.append(self.buffer)
            self.buffer += 1
            return
        word = self.stack.pop()
        self.heads[word] = self.buffer if transition == LEFT else self.stack[-1]
        self.relations[word] = relation

    def costs(self, gold: Sequence[int]) -> dict[str, int]:
        """How many gold arcs each legal transition makes unreachable (Goldberg & Nivre 2013, section 4.2).

        `gold[w]` is the head of word w, n for the root. Exact for projective trees.
        """
        costs: dict[str, int] = {}
        stack = self.stack
        for transition in self.legal():
            if transition == SHIFT:
                word = self.buffer
                lost = gold[word] in stack[:-1]
                costs[SHIFT] = lost + sum(gold[other] == word for other in stack)
                continue
            top = stack[-1]
            dependents = sum(gold[word] == top for word in range(self.buffer, self.words))
            if transition == LEFT:
                lost = gold[top] > self.buffer or (len(stack) > 1 and gold[top] == stack[-2])
            else:
                lost = gold[top] >= self.buffer
            costs[transition] = lost + dependents
        return costs


MASKS = [(SHIFT,), (LEFT,), (SHIFT, LEFT), (LEFT, RIGHT), (SHIFT, LEFT, RIGHT)]


def mask_number(state: Configuration) -> int:
    """Which of MASKS the legal transitions are."""
    return MASKS.index(tuple(state.legal()))


def projective(heads: Sequence[int]) -> bool:
    """Whether no two arcs cross and one word hangs on the root (heads 1-based, 0 = root)."""
    arcs = [(min(word, head), max(word, head)) for word, head in enumerate(heads, 1)]
    crossing = any(a < c < b < d for a, b in arcs for c, d in arcs)
    return not crossing and list(heads).count(0) == 1


class Classifier(nn.Module):
    """Scores of actions from the vectors of the places that are looked at: one hidden layer."""

    def __init__(self, places: int, width: int, hidden: int, actions: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(places * width, hidden)
        self.out = nn.Linear(hidden, actions)

    def forward(self, *places: Tensor) -> Tensor:
        """Scores `[..., actions]` from vectors `[..., width]`, one per place."""
        return self.score(torch.cat(places, -1))

    def score(self, row: Tensor) -> Tensor:
        """Scores `[..., actions]` from one row `[..., places * width]`."""
        scores: Tensor = self.out(torch.tanh(self.hidden(row)))
        return scores


class Parser(nn.Module):
    """Vectors of words from BiLSTMs; scores of actions from the top three of the stack and the next word."""

    first: Tensor
    illegal: Tensor

    def __init__(
        self,
        words: int,
        tags: int,
        relations: int,
        *,
        embedding: int = 100,
        tag_embedding: int = 25,
        hidden: int = 125,
        layers: int = 2,
        classifier: int = 100,
        word_dropout: float = 0.25,
    ):
        super().__init__()
        widths = [embedding + tag_embedding] + [2 * hidden] * (layers - 1)
        self.word = nn.Embedding(words, embedding)
        self.tag = nn.Embedding(tags, tag_embedding)
        self.root = nn.Embedding(1, embedding + tag_embedding)
        self.missing = nn.Embedding(1, 2 * hidden)  # a place of the stack where there is no word
        self.left_to_right = nn.ModuleList(nn.LSTMCell(width, hidden) for width in widths)
        self.right_to_left = nn.ModuleList(nn.LSTMCell(width, hidden) for width in widths)
        self.classify = Classifier(4, 2 * hidden, classifier, 1 + 2 * relations)
        kinds = [(SHIFT, 0)] + [(side, r) for side in (LEFT, RIGHT) for r in range(relations)]
        self.actions = [(i, side, relation) for i, (side, relation) in enumerate(kinds)]
        self.places = {side: [i for i, s, _ in self.actions if s == side] for side in (SHIFT, LEFT, RIGHT)}
        illegal = [[0.0 if s in allowed else -1e9 for _, s, _ in self.actions] for allowed in MASKS]
        self.register_buffer("illegal", torch.tensor(illegal), persistent=False)
        self.word_dropout = word_dropout
        self.round = 0  # exploration and word dropout are drawn anew in each round
        self.register_buffer("first", torch.tensor(0), persistent=False)

    def encode(self, sentence: Sentence, chance: random.Random | None = None) -> list[Tensor]:
        """Vectors `[2 * hidden]` of the words, of the root, and of a missing word."""
        vectors = []
        for word, tag in zip(sentence.words, sentence.tags, strict=True):
            hide = chance is not None and chance.random() < self.word_dropout
            word = self.first if hide else word  # id 0 is the unknown word
            vectors.append(torch.cat([self.word(word), self.tag(tag)]))
        vectors.append(self.root(self.first))
        for forth, back in zip(self.left_to_right, self.right_to_left, strict=True):
            left = states(forth, vectors)
            right = states(back, vectors[::-1])[::-1]
            vectors = [torch.cat(pair) for pair in zip(left, right, strict=True)]
        return [*vectors, self.missing(self.first)]

    def scores(self, vectors: Sequence[Tensor], state: Configuration) -> Tensor:
        """Scores `[1 + 2 * relations]` of SHIFT, then LEFT and RIGHT with each relation."""
        places = ([-1, -1, -1] + state.stack)[-3:] + [state.buffer]
        scores: Tensor = self.classify(*[vectors[place] for place in places])
        return scores

    @fxbatch.autobatch(out="list")
    def forward(self, sentence: Sentence) -> Parse:
        """The parse that taking the best legal action each time gives."""
        vectors = self.encode(sentence)
        state = Configuration(len(sentence.words))
        while not state.done:
            scores = self.scores(vectors, state) + self.illegal[mask_number(state)]
            _, transition, relation = self.actions[int(scores.argmax())]
            state.take(transition, relation)
        return state.parse()

    @fxbatch.autobatch
    def loss(self, sentence: Sentence) -> Tensor:
        """The hinge losses of the actions that the oracle, or exploration, leads through: no dimensions."""
        chance = random.Random(sentence.number * 1_000_003 + self.round)
        vectors = self.encode(sentence, chance)
        words = len(sentence.words)
        gold = [head - 1 if head else words for head in sentence.heads]
        state = Configuration(words)
        total = torch.zeros((), device=self.first.device, dtype=self.missing.weight.dtype)
        while not state.done:
            scores = self.scores(vectors, state)
            numbers = scores.tolist()
            right, wrong = self.judge(state, gold, sentence.relations, numbers)
            margin = numbers[right] - numbers[wrong] if wrong is not None else 2.0
            if margin < 1:
                total = total + (1 - scores[right] + scores[wrong])
            explore = margin < 0 or (margin < 1 and chance.random() < 0.1)
            state.take(*self.actions[wrong if explore and wrong is not None else right][1:])
        return total

    def judge(
        self, state: Configuration, gold: Sequence[int], relations: Sequence[int], scores: Sequence[float]
    ) -> tuple[int, int | None]:
        """The best-scored action that loses nothing, and the best-scored one that does, if there is one."""
        right: list[int] = []
        wrong: list[int] = []
        top = state.stack[-1] if state.stack else -1
        below = state.stack[-2] if len(state.stack) > 1 else -1
        for transition, cost in state.costs(gold).items():
            actions = self.places[transition]
            head = {LEFT: state.buffer, RIGHT: below}.get(transition)
            if cost == 0 and head is not None and gold[top] == head:  # the gold arc wants its relation
                labelled = actions[relations[top]]
                right.append(labelled)
                actions = [action for action in actions if action != labelled]
                cost = 1
            if actions:
                (wrong if cost else right).append(max(actions, key=scores.__getitem__))
        best = max(right, key=scores.__getitem__)
        return best, max(wrong, key=scores.__getitem__) if wrong else None


def states(cell: nn.Module, vectors: Sequence[Tensor]) -> list[Tensor]:
    """The hidden states `[hidden]` of an LSTM cell after each vector."""
    state, hidden = None, []
    for vector in vectors:
        state = cell(vector, state)
        hidden.append(state[0])
    return hidden


def build(words: int, tags: int, relations: int, *, hidden: int = 125, embedding: int = 100) -> Parser:
    """The model, at the paper's sizes unless told otherwise."""
    return Parser(words, tags, relations, hidden=hidden, embedding=embedding)


def minibatch(*, sentences: int = 4, hidden: int = 8, seed: int = 0) -> tuple[Parser, list[Sentence]]:
    """A small model and random sentences of 2 to 7 words, each a chain of arcs."""
    torch.manual_seed(seed)
    lengths = [int(n) for n in torch.randint(2, 8, (sentences,))]
    instances = []
    for number, n in enumerate(lengths):
        words, tags = torch.randint(0, 30, (n,)).unbind(), torch.randint(0, 6, (n,)).unbind()
        relations = torch.randint(0, 4, (n,)).tolist()
        instances.append(Sentence(words, tags, list(range(n)), relations, number))
    return build(30, 6, 4, hidden=hidden, embedding=10), instances


@torch.no_grad()
def attachment(model: Parser, sentences: Sequence[Sentence], batch_size: int) -> tuple[float, float]:
    """Unlabelled and labelled attachment score over all words."""
    model.eval()
    unlabelled = labelled = words = 0
    for batch in in_batches(sentences, batch_size):
        for sentence, parse in zip(batch, model(batch), strict=True):
            for word, (head, relation) in enumerate(zip(parse.heads, parse.relations, strict=True)):
                attached = head == sentence.heads[word]
                unlabelled += attached
                labelled += attached and relation == sentence.relations[word]
            words += len(sentence.words)
    model.train()
    return unlabelled / words, labelled / words


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    """Train on the projective sentences of EWT; attachment scores on all dev sentences after each epoch."""
    options = training_options(main.__doc__, "ud_ewt", epochs=3)
    options.add_argument("--hidden", type=positive, default=125)
    add_checkpoint(options)
    args = options.parse_args(argv)
    return train(args, functools.partial(build, hidden=args.hidden))


def train(
    args: argparse.Namespace,
    build: Callable[[int, int, int], Parser],
    prepare: Callable[[Sentence], Sentence] | None = None,
) -> tuple[float, float]:
    """Train what `build(words, tags, relations)` gives, on sentences as `prepare` makes them."""
    torch.manual_seed(args.seed)
    shuffle = random.Random(args.seed)
    train, dev, sizes = load(args.data, args.limit, args.device)
    if prepare is not None:
        train, dev = [list(map(prepare, part)) for part in (train, dev)]
    model = build(*sizes).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), args.rate)
    found = (0.0, 0.0)
    done = resume(args.checkpoint, args, model, optimizer)
    if done >= args.epochs:
        found = attachment(model, dev, args.batch_size)
    with loop_if(args.disabled):
        for model.round in range(1, args.epochs + 1):
            shuffle.shuffle(train)
            if model.round <= done:
                continue
            batches = in_batches(train, args.batch_size)
            mean, seconds = train_epoch(model.round, batches, model.loss, optimizer)
            keep(args.checkpoint, model.round, args, model, optimizer)
            found = attachment(model, dev, args.batch_size)
            scores = f"UAS {found[0]:.2%}, LAS {found[1]:.2%}"
            print(f"epoch {model.round}: loss a sentence {mean:.3f}, dev {scores}, {seconds:.0f} s")
    return found


def load(
    data: str | None, limit: int | None, device: str
) -> tuple[list[Sentence], list[Sentence], tuple[int, int, int]]:
    """Projective train sentences, all dev sentences, and how many words, tags and relations there are.

    Relations are the universal ones, without subtypes, as the CoNLL 2018 shared task scores them.
    """
    folder = find_data("ud_ewt", data)
    raw, raw_dev = (
        read_conllu(file_in(folder, f"en_ewt-ud-{part}.conllu"))[:limit] for part in ("train", "dev")
    )
    tokens = [token for sentence in raw for token in sentence.tokens]
    words = Vocabulary.build((token.form for token in tokens), min_count=2, device=device)
    tags = Vocabulary.build((token.upos for token in tokens), device=device)
    relations = Vocabulary.build(universal(token.relation) for token in tokens)
    found: list[list[Sentence]] = [[], []]
    for part, sentences in zip(found, (raw, raw_dev), strict=True):
        for number, sentence in enumerate(sentences):
            forms = words.encode(t.form for t in sentence.tokens)
            kinds = tags.encode(t.upos for t in sentence.tokens)
            heads = [t.head for t in sentence.tokens]
            gold = [relations.number(universal(t.relation)) for t in sentence.tokens]
            part.append(Sentence(forms, kinds, heads, gold, number))
    train = [sentence for sentence in found[0] if projective(sentence.heads)]
    return train, found[1], (len(words), len(tags), len(relations))


def universal(relation: str) -> str:
    """A relation without its subtype: `obl:tmod` is `obl`."""
    return relation.partition(":")[0]


if __name__ == "__main__":
    run(main)
