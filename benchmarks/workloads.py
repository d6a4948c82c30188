"""The data of the tasks: real where it is found, else made up with a note in the case's parameters.

In: Settings. Out: a model of the wanted size and Batches for it, on the wanted device.

    model, batches, source = sst_trees(settings, hidden=150, batch=64)         # source: "SST" or "generated"
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import Batches, Looks
from benchmarks.models import BareTreeLSTM, Labeller, Node, TreeLSTM, random_sentences, random_trees
from benchmarks.task import Settings, Skip
from examples import char_tagger, molecules, parser
from examples.bilstm_tagger import Sentence
from examples.bilstm_tagger import encode as encode_sentence
from fxbatch.data.conllu import read_conllu
from fxbatch.data.generated import generate_treebank
from fxbatch.data.molecules import read_molecules
from fxbatch.data.paths import file_in, find_data, locate
from fxbatch.data.sst import Tree, read_trees
from fxbatch.data.vocabulary import Vocabulary
from fxbatch.errors import DataError


@functools.lru_cache(maxsize=4)
def _sst(data: Path | None, part: str, seed: int, device: torch.device) -> tuple[list[Node], int, str]:
    """Encoded trees of a part, how many words, where they come from."""
    folder = locate("sst", data)
    if folder is None:
        raw, source = generate_treebank(seed)[part], "generated"
    else:
        raw, source = read_trees(file_in(folder, f"{part}.txt")), "SST"
    vocabulary = Vocabulary.build((leaf.word or "" for tree in raw for leaf in tree.leaves()), device=device)
    return [vocabulary.encode_tree(tree) for tree in raw], len(vocabulary), source


def sst_trees(
    settings: Settings, *, hidden: int, batch: int, embedding: int = 300, bare: bool = False
) -> tuple[TreeLSTM, Batches[Node], str]:
    """The all-node Tree-LSTM and minibatches of the treebank, in the order of the file."""
    part = settings.size("train", "dev")
    trees, words, source = _sst(settings.data, part, settings.seed, settings.device)
    torch.manual_seed(settings.seed)
    model = (BareTreeLSTM if bare else TreeLSTM)(words, embedding=embedding, hidden=hidden)
    return model.to(settings.device), Batches.of(trees, batch), source


def made_up_trees(
    settings: Settings,
    *,
    leaves: int,
    hidden: int,
    batch: int,
    embedding: int = 300,
    all_nodes: bool = True,
    equal: bool = False,
    words: int = 1000,
) -> tuple[TreeLSTM, Batches[Node]]:
    """A Tree-LSTM and minibatches of random trees, other ones each round."""
    torch.manual_seed(settings.seed)
    model = TreeLSTM(words, embedding=embedding, hidden=hidden, all_nodes=all_nodes).to(settings.device)

    def make(number: int) -> list[Node]:
        seed = settings.seed + 7919 * (number + 1)
        trees = random_trees(batch, leaves=leaves, words=words, equal=equal, seed=seed)
        return trees if settings.device.type == "cpu" else [moved(tree, settings.device) for tree in trees]

    return model, Batches(make)


def moved(tree: Node, device: torch.device) -> Node:
    """The tree with its words and labels on the device: one tensor a number, as a vocabulary gives them."""
    numbers = _numbers(device)
    stack: list[Node] = []
    for node in tree.postorder():
        label = numbers[int(node.label)]
        if node.left is None:
            assert node.word is not None
            stack.append(Tree(label, numbers[int(node.word)]))
        else:
            right = stack.pop()
            stack.append(Tree(label, None, stack.pop(), right))
    return stack.pop()


@functools.lru_cache(maxsize=2)
def _numbers(device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(row.clone() for row in torch.arange(1000).to(device).unbind())


def made_up_sentences(settings: Settings, *, length: int, batch: int) -> Batches[Sentence]:
    """Sentences of the size of Neubig et al.'s figure 2: vocabulary 1000, 300 labels."""

    def make(number: int) -> list[Sentence]:
        sentences = random_sentences(batch, length=length, seed=settings.seed + 7919 * (number + 1))
        if settings.device.type == "cpu":
            return sentences
        table = _numbers(settings.device)
        return [
            Sentence([table[int(w)] for w in s.words], [table[int(t)] for t in s.tags]) for s in sentences
        ]

    return Batches(make)


@functools.lru_cache(maxsize=2)
def _ewt(data: Path | None, limit: int | None, device: torch.device) -> tuple[list[Sentence], int, int]:
    folder = _folder("ud_ewt", data)
    part = "train" if limit is None else "dev"  # a few sentences: the smaller file has them
    raw = read_conllu(file_in(folder, f"en_ewt-ud-{part}.conllu"))[:limit]
    words = Vocabulary.build((t.form for s in raw for t in s.tokens), min_count=2, device=device)
    tags = Vocabulary.build((t.upos for s in raw for t in s.tokens), device=device)
    return [encode_sentence(sentence, words, tags) for sentence in raw], len(words), len(tags)


def ewt_tagger(
    settings: Settings, *, hidden: int, batch: int, embedding: int = 200, layers: int = 2
) -> tuple[Labeller, Batches[Sentence]]:
    """The BiLSTM tagger and minibatches of EWT's training sentences, in the file's order. Skip without."""
    sentences, words, tags = _ewt(settings.data, settings.size(None, 200), settings.device)
    torch.manual_seed(settings.seed)
    model = Labeller(words, tags, embedding=embedding, hidden=hidden, layers=layers).to(settings.device)
    return model, Batches.of(sentences, batch)


def ner_tagger(
    settings: Settings, *, hidden: int, batch: int
) -> tuple[char_tagger.CharTagger, Batches[char_tagger.Sentence]]:
    """The tagger that spells rare words, and minibatches of WikiNER. Skip without."""
    _folder("ner", settings.data)
    limit = settings.size(None, 200)
    data = None if settings.data is None else str(settings.data)
    found = char_tagger.load(data, limit, 5, str(settings.device))
    torch.manual_seed(settings.seed)
    return char_tagger.build(*found.sizes, hidden=hidden).to(settings.device), Batches.of(found.train, batch)


def ewt_parser(
    settings: Settings, *, hidden: int, batch: int
) -> tuple[parser.Parser, Batches[parser.Sentence]]:
    """The transition-based parser and minibatches of EWT's projective sentences. Skip without."""
    _folder("ud_ewt", settings.data)
    data = None if settings.data is None else str(settings.data)
    train, _, sizes = parser.load(data, settings.size(None, 200), str(settings.device))
    torch.manual_seed(settings.seed)
    return parser.build(*sizes, hidden=hidden).to(settings.device), Batches.of(train, batch)


def spelled_looks(model: char_tagger.CharTagger, batch: Sequence[char_tagger.Sentence]) -> Looks:
    """The look-ups of a minibatch in the tagger that spells rare words."""
    words = [word for sentence in batch for word in sentence.words]
    return [
        (model.embed, [word.id for word in words if word.id is not None]),
        (model.character, [letter for word in words if word.id is None for letter in word.characters]),
    ]


def spelled_lookups(sentence: char_tagger.Sentence) -> int:
    """How many words and letters of a sentence are looked up."""
    return sum(1 if word.id is not None else len(word.characters) for word in sentence.words)


def parser_looks(model: parser.Parser, batch: Sequence[parser.Sentence]) -> Looks:
    """The look-ups of a minibatch in the parser; `first` stands for a hidden word, the root, a missing word."""
    return [
        (model.word, [model.first, *(word for sentence in batch for word in sentence.words)]),
        (model.tag, [tag for sentence in batch for tag in sentence.tags]),
        (model.root, [model.first]),
        (model.missing, [model.first]),
    ]


def esol_molecules(
    settings: Settings, *, hidden: int, batch: int
) -> tuple[molecules.MoleculeNetwork, Batches[molecules.Molecule]]:
    """The graph network and minibatches of ESOL. Skip without."""
    path = _folder("molecules", settings.data) / "graphs_delaney.npz"
    raw = read_molecules(path)[: settings.size(None, 100)]
    found, sizes, _ = molecules.prepare(raw, str(settings.device))
    torch.manual_seed(settings.seed)
    return molecules.build(*sizes, hidden=hidden).to(settings.device), Batches.of(found, batch)


def molecule_looks(model: molecules.MoleculeNetwork, batch: Sequence[molecules.Molecule]) -> Looks:
    """The look-ups of a minibatch in the graph network."""
    return [
        (model.atom, [atom for molecule in batch for atom in molecule.atoms]),
        (model.bond, [kind for molecule in batch for kind in molecule.kinds]),
    ]


def _folder(name: str, data: Path | None) -> Path:
    try:
        return find_data(name, data)
    except DataError as error:
        raise Skip(str(error)) from error


def calls_of(trees: Sequence[Any]) -> int:
    """Nodes of the trees."""
    return sum(tree.nodes for tree in trees)
