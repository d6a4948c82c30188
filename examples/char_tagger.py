"""Named-entity tagger with a character BiLSTM for rare words, written for ONE sentence.

In: a sentence; a frequent word brings its id, a rare one its characters. Out: scores of the tags, a tensor a
word. Which path a word takes differs from word to word, so the structure differs from sentence to sentence.
The tagger of Neubig et al. 2017, table 1 ("BiLSTM w/ char"); WikiNER, tested on Wikigold by entity F1. In
training, vectors are dropped out, and a share of the frequent words is spelled out as well: rare words alone are
too few to learn spelling from.

    model, sentences = minibatch()
    scores = model(sentences)            # a list of sentences in, a list of lists of scores out
    model.loss(sentences).sum().backward()
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from fxbatch_examples.command import (
    add_checkpoint,
    in_batches,
    keep,
    loop_if,
    resume,
    run,
    train_epoch,
    training_options,
)
from torch import Tensor, nn

import fxbatch
from fxbatch.data.ner import TaggedSentence as Tagged
from fxbatch.data.ner import entities, read_ner
from fxbatch.data.paths import file_in, find_data
from fxbatch.data.vocabulary import Vocabulary


@dataclass(frozen=True)
class Word:
    """The id of a word that is looked up, None for one that is spelled out; the ids of its characters."""

    id: Tensor | None
    characters: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Sentence:
    """Words and the tag id of each."""

    words: Sequence[Word]
    tags: Sequence[Tensor]


class CharTagger(nn.Module):
    """Embeddings of frequent words and character BiLSTMs for rare ones; a BiLSTM; a hidden layer; scores."""

    def __init__(
        self,
        words: int,
        characters: int,
        tags: int,
        *,
        embedding: int = 128,
        character_embedding: int = 20,
        hidden: int = 50,
        classifier: int = 32,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.embed = nn.Embedding(words, embedding)
        self.character = nn.Embedding(characters, character_embedding)
        self.spell_forth = nn.LSTMCell(character_embedding, embedding // 2)
        self.spell_back = nn.LSTMCell(character_embedding, embedding // 2)
        self.left_to_right = nn.LSTMCell(embedding, hidden)
        self.right_to_left = nn.LSTMCell(embedding, hidden)
        self.out = nn.Sequential(nn.Linear(2 * hidden, classifier), nn.Tanh(), nn.Linear(classifier, tags))

    def vector(self, word: Word) -> Tensor:
        """The vector `[embedding]` of a word: looked up, or spelled out."""
        if word.id is not None:
            return self.embed(word.id)
        letters = [self.character(letter) for letter in word.characters]
        forth = states(self.spell_forth, letters)[-1]
        back = states(self.spell_back, letters[::-1])[-1]
        return torch.cat([forth, back])

    def scores(self, sentence: Sentence) -> list[Tensor]:
        """Scores `[tags]` of each word."""
        vectors = [self.drop(self.vector(word)) for word in sentence.words]
        left = states(self.left_to_right, vectors)
        right = states(self.right_to_left, vectors[::-1])[::-1]
        return [self.out(self.drop(torch.cat(pair))) for pair in zip(left, right, strict=True)]

    @fxbatch.autobatch(out="list")
    def forward(self, sentence: Sentence) -> list[Tensor]:
        """Scores `[tags]` of each word."""
        return self.scores(sentence)

    @fxbatch.autobatch
    def loss(self, sentence: Sentence) -> Tensor:
        """Cross entropy, summed over the words: no dimensions."""
        losses = [F.cross_entropy(*pair) for pair in zip(self.scores(sentence), sentence.tags, strict=True)]
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total


def states(cell: nn.Module, vectors: Sequence[Tensor]) -> list[Tensor]:
    """The hidden states `[hidden]` of an LSTM cell after each vector."""
    state, hidden = None, []
    for vector in vectors:
        state = cell(vector, state)
        hidden.append(state[0])
    return hidden


@dataclass
class EntityScore:
    """Counts of gold, predicted and right entities: the CoNLL 2003 score.

    An entity is right when its kind and both its ends are.
    """

    gold: int = 0
    predicted: int = 0
    right: int = 0

    def add(self, gold: Sequence[str], predicted: Sequence[str]) -> None:
        """Count one sentence."""
        wanted, got = entities(gold), entities(predicted)
        self.gold += len(wanted)
        self.predicted += len(got)
        self.right += len([entity for entity in got if entity in wanted])

    @property
    def precision(self) -> float:
        """Right ones among the predicted; 0 without any."""
        return self.right / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """Right ones among the gold; 0 without any."""
        return self.right / self.gold if self.gold else 0.0

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall; 0 without right ones."""
        return 2 * self.right / (self.gold + self.predicted) if self.right else 0.0

    def __str__(self) -> str:
        return f"precision {self.precision:.2%}, recall {self.recall:.2%}, F1 {self.f1:.2%}"


def build(
    words: int, characters: int, tags: int, *, embedding: int = 128, hidden: int = 50, dropout: float = 0.0
) -> CharTagger:
    """The model, at the paper's sizes unless told otherwise."""
    return CharTagger(words, characters, tags, embedding=embedding, hidden=hidden, dropout=dropout)


def spell_out(sentence: Sentence, share: float, chance: random.Random) -> Sentence:
    """The sentence with a share of its frequent words, drawn by chance, spelled out like rare ones."""
    words = [
        Word(None, word.characters) if word.id is not None and chance.random() < share else word
        for word in sentence.words
    ]
    return Sentence(words, sentence.tags)


def minibatch(*, sentences: int = 8, hidden: int = 8, seed: int = 0) -> tuple[CharTagger, list[Sentence]]:
    """A small model and random sentences of 1 to 7 words, a third of them spelled out."""
    torch.manual_seed(seed)
    chance = random.Random(seed)
    instances = []
    for _ in range(sentences):
        words = []
        for _ in range(chance.randint(1, 7)):
            letters = torch.randint(0, 20, (chance.randint(1, 6),)).unbind()
            rare = chance.random() < 1 / 3
            words.append(Word(None, letters) if rare else Word(torch.tensor(chance.randrange(30))))
        instances.append(Sentence(words, torch.randint(0, 5, (len(words),)).unbind()))
    return build(30, 20, 5, embedding=10, hidden=hidden), instances


@torch.no_grad()
def evaluate(model: CharTagger, part: Part, names: Sequence[str], batch_size: int) -> EntityScore:
    """Entities found with the best tag of each word, against those of the file's own tags."""
    model.eval()
    score = EntityScore()
    for start in range(0, len(part.sentences), batch_size):
        batch = slice(start, start + batch_size)
        for tags, scores in zip(part.tags[batch], model(part.sentences[batch]), strict=True):
            best = torch.stack(list(scores)).argmax(1).tolist()
            score.add(tags, [names[tag] for tag in best])
    model.train()
    return score


def main(argv: Sequence[str] | None = None) -> float:
    """Train on WikiNER; entity F1 on Wikigold after each epoch, the last one returned."""
    options = training_options(main.__doc__, "ner", epochs=3, rate=0.002)
    options.add_argument(
        "--held-out", type=int, default=0, help="keep the last HELD_OUT of WikiNER for a score"
    )
    options.add_argument("--dropout", type=float, default=0.33, help="of the words' vectors and states")
    options.add_argument("--rare", type=int, default=5, help="words seen at most so often are spelled out")
    options.add_argument(
        "--spell", type=float, default=0.1, help="share of the others spelled out in training"
    )
    add_checkpoint(options)
    args = options.parse_args(argv)
    torch.manual_seed(args.seed)
    shuffle = random.Random(args.seed)
    found = load(args.data, args.limit, args.rare, args.device, args.held_out)
    train = found.train
    model = build(*found.sizes, dropout=args.dropout).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), args.rate)
    score = EntityScore()
    done = resume(args.checkpoint, args, model, optimizer)
    if done >= args.epochs:
        score = evaluate(model, found.parts["dev"], found.names, args.batch_size)
    with loop_if(args.disabled):
        for epoch in range(1, args.epochs + 1):
            shuffle.shuffle(train)
            if epoch <= done:
                continue
            chance = random.Random(f"{args.seed} {epoch}")
            spelled = [spell_out(sentence, args.spell, chance) for sentence in train]
            mean, seconds = train_epoch(epoch, in_batches(spelled, args.batch_size), model.loss, optimizer)
            keep(args.checkpoint, epoch, args, model, optimizer)
            scores = {n: evaluate(model, p, found.names, args.batch_size) for n, p in found.parts.items()}
            score = scores["dev"]
            shown = ", ".join(f"{name} {each}" for name, each in scores.items())
            print(f"epoch {epoch}: loss a sentence {mean:.3f}, {shown}, {seconds:.0f} s")
    return score.f1


@dataclass(frozen=True)
class Part:
    """Sentences to be scored, and the tags of each as the file has them, also those that training never had."""

    sentences: list[Sentence]
    tags: list[Sequence[str]]


@dataclass(frozen=True)
class Data:
    """The training sentences, the scored sets by name, the tags' names, how many words, characters and tags."""

    train: list[Sentence]
    parts: dict[str, Part]
    names: Sequence[str]
    sizes: tuple[int, int, int]


def load(data: str | None, limit: int | None, rare: int, device: str, held_out: int = 0) -> Data:
    """WikiNER to train on; Wikigold ("dev") and, if asked for, the last sentences of WikiNER ("held out")."""
    folder = find_data("ner", data)
    raw = read_ner(file_in(folder / "wikiner10k", "train.conll"))
    raw_held = raw[len(raw) - held_out :] if held_out > 0 else []
    raw = raw[: len(raw) - len(raw_held)][:limit]
    raw_dev = read_ner(file_in(folder / "wikigold", "wikigold.conll"))[:limit]
    counts = Counter(form for sentence in raw for form in sentence.forms)
    words = Vocabulary.build((form for s in raw for form in s.forms), min_count=rare + 1, device=device)
    letters = Vocabulary.build("".join(counts), min_count=2, device=device)
    tags = Vocabulary.build((tag for sentence in raw for tag in sentence.tags), device=device)

    @functools.cache
    def word(form: str) -> Word:
        return Word(words.tensor(form) if form in words else None, letters.encode(form))

    def encode(sentences: Sequence[Tagged]) -> list[Sentence]:
        return [Sentence([word(form) for form in s.forms], tags.encode(s.tags)) for s in sentences]

    scored = {"dev": raw_dev, "held out": raw_held} if raw_held else {"dev": raw_dev}
    parts = {name: Part(encode(part), [s.tags for s in part]) for name, part in scored.items()}
    return Data(encode(raw), parts, tags.words, (len(words), len(letters), len(tags)))


if __name__ == "__main__":
    run(main)
