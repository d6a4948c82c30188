"""Named-entity tagger with a Transformer encoder, written for ONE sentence of T words.

In: a sentence: ids of its words, of their endings and of their shapes, `[T]` each. Out: scores of the tags `[T, tags]`.
All words of a minibatch are rows of one tensor; attention alone pads (docs/sizes.md). Trained on WikiNER, scored by
entity F1 on sentences kept from it and on Wikigold. `char_tagger.py` is the task written word by word.

    model, sentences = minibatch()
    scores = model(sentences)            # a list of sentences in, a list of [T, tags] out
    model.loss(sentences).sum().backward()
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from fxbatch_examples.char_tagger import EntityScore
from fxbatch_examples.command import in_batches, loop_if, positive, run, train_epoch, training_options
from torch import Tensor, nn

import fxbatch
from fxbatch.data.ner import TaggedSentence as Tagged
from fxbatch.data.ner import read_ner
from fxbatch.data.paths import file_in, find_data
from fxbatch.data.vocabulary import Vocabulary

Sentence = dict[str, Tensor]  # words, endings, shapes, tags: int64 [T] each
Part = list[tuple[Sentence, Tagged]]  # with the tags as the file has them
FEATURES = ("words", "endings", "shapes")


class TransformerTagger(nn.Module):
    """Embeddings of a word, its ending, its shape and its place; an encoder; one linear layer."""

    frequencies: Tensor

    def __init__(
        self,
        sizes: Sequence[int],
        tags: int,
        *,
        hidden: int = 128,
        heads: int = 4,
        layers: int = 2,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.embed = nn.ModuleList(nn.Embedding(n, hidden) for n in sizes)  # one a feature
        self.drop = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(
            hidden, heads, 2 * hidden, dropout, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, tags))
        frequencies = 10_000 ** (-torch.arange(hidden // 2) / (hidden // 2))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def places(self, count: int) -> Tensor:
        """Sines and cosines of the places in a sentence, `[count, hidden]` (Vaswani et al. 2017, section 3.5)."""
        angles = torch.arange(count, device=self.frequencies.device).unsqueeze(1) * self.frequencies
        return torch.cat([angles.sin(), angles.cos()], 1)

    def scores(self, sentence: Sentence) -> Tensor:
        """Scores `[T, tags]`."""
        words = sum(embed(sentence[name]) for embed, name in zip(self.embed, FEATURES, strict=True))
        rows = self.drop(words + self.places(len(sentence["words"])))
        found: Tensor = self.out(self.encoder(rows))
        return found

    @fxbatch.autobatch(out="list")
    def forward(self, sentence: Sentence) -> Tensor:
        """Scores `[T, tags]`."""
        return self.scores(sentence)

    @fxbatch.autobatch
    def loss(self, sentence: Sentence) -> Tensor:
        """Cross entropy, summed over the words: no dimensions."""
        return F.cross_entropy(self.scores(sentence), sentence["tags"], reduction="sum")


def build(
    sizes: Sequence[int], tags: int, *, hidden: int = 128, layers: int = 2, dropout: float = 0.0
) -> TransformerTagger:
    """The model."""
    return TransformerTagger(sizes, tags, hidden=hidden, layers=layers, dropout=dropout)


def minibatch(
    *, sentences: int = 8, hidden: int = 16, seed: int = 0
) -> tuple[TransformerTagger, list[Sentence]]:
    """A small model and random sentences of 1 to 9 words."""
    torch.manual_seed(seed)
    sizes = {"words": 30, "endings": 20, "shapes": 6, "tags": 5}
    lengths = [int(n) for n in torch.randint(1, 10, (sentences,))]
    instances = [{name: torch.randint(0, n, (t,)) for name, n in sizes.items()} for t in lengths]
    return build([30, 20, 6], 5, hidden=hidden), instances


@torch.no_grad()
def evaluate(model: TransformerTagger, part: Part, names: Sequence[str], batch_size: int) -> EntityScore:
    """Entities found with the best tag of each word, against those of the file's own tags."""
    model.eval()
    score = EntityScore()
    for batch in in_batches(part, batch_size):
        for (_, tagged), scores in zip(batch, model([sentence for sentence, _ in batch]), strict=True):
            score.add(tagged.tags, [names[tag] for tag in scores.argmax(1).tolist()])
    model.train()
    return score


def main(argv: Sequence[str] | None = None) -> float:
    """Train on WikiNER; entity F1 on kept sentences and on Wikigold after each epoch, the first returned."""
    options = training_options(main.__doc__, "ner", epochs=10)
    options.add_argument(
        "--held-out", type=positive, default=500, help="sentences of WikiNER kept to be scored"
    )
    options.add_argument("--hidden", type=positive, default=128)
    options.add_argument("--layers", type=positive, default=2)
    options.add_argument("--dropout", type=float, default=0.2)
    args = options.parse_args(argv)
    torch.manual_seed(args.seed)
    shuffle = random.Random(args.seed)
    train, parts, sizes, tags = load(args.data, args.limit, args.held_out, args.device)
    model = build(sizes, len(tags), hidden=args.hidden, layers=args.layers, dropout=args.dropout)
    model = model.to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), args.rate)
    found: dict[str, EntityScore] = {}
    with loop_if(args.disabled):
        for epoch in range(1, args.epochs + 1):
            shuffle.shuffle(train)
            mean, seconds = train_epoch(epoch, in_batches(train, args.batch_size), model.loss, optimizer)
            found = {name: evaluate(model, part, tags, args.batch_size) for name, part in parts.items()}
            shown = ", ".join(f"{name} F1 {score.f1:.2%}" for name, score in found.items())
            print(f"epoch {epoch}: loss a sentence {mean:.3f}, {shown}, {seconds:.0f} s")
    return found["kept"].f1


def shape(form: str) -> str:
    """`Xx` of a capitalised word, `X` of capitals, `d` of digits, `x-d` of what mixes them."""
    kinds = "".join("X" if c.isupper() else "x" if c.islower() else "d" if c.isdigit() else c for c in form)
    return re.sub(r"(.)\1+", r"\1", kinds)


def load(
    data: str | None, limit: int | None, held_out: int, device: str
) -> tuple[list[Sentence], dict[str, Part], list[int], Sequence[str]]:
    """The training sentences, the scored sets by name, how many ids each feature has, the names of the tags."""
    folder = find_data("ner", data)
    raw = read_ner(file_in(folder / "wikiner10k", "train.conll"))
    held_out = min(held_out, len(raw) // 2)
    kept, raw = raw[-held_out:][:limit], raw[:-held_out][:limit]
    gold = read_ner(file_in(folder / "wikigold", "wikigold.conll"))[:limit]
    forms = [form for sentence in raw for form in sentence.forms]
    features = {
        "words": Vocabulary.build(map(str.lower, forms), min_count=2),
        "endings": Vocabulary.build((form[-3:] for form in forms), min_count=2),
        "shapes": Vocabulary.build(map(shape, forms), min_count=2),
    }
    tags = Vocabulary.build(tag for sentence in raw for tag in sentence.tags)

    def encode(sentence: Tagged) -> Sentence:
        texts = {
            "words": [form.lower() for form in sentence.forms],
            "endings": [form[-3:] for form in sentence.forms],
            "shapes": [shape(form) for form in sentence.forms],
        }
        ids = {name: [features[name].number(text) for text in texts[name]] for name in FEATURES}
        ids["tags"] = [tags.number(tag) for tag in sentence.tags]
        return {name: torch.tensor(numbers, device=device) for name, numbers in ids.items()}

    parts = {name: [(encode(s), s) for s in part] for name, part in (("kept", kept), ("Wikigold", gold))}
    sizes = [len(features[name]) for name in FEATURES]
    return [encode(sentence) for sentence in raw], parts, sizes, tags.words


if __name__ == "__main__":
    run(main)
