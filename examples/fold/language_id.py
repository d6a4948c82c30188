"""Language identification: which of five languages a word is from, by its letters.

In: pairs (word, language). Out: (loss, logits). A GRU over letters, read in both directions. After Fold's
examples; the words are the everyday ones below.

    python examples/fold/language_id.py --epochs 20
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from fxbatch_examples.fold.training import accuracy, console, fit
from torch import nn

import fxbatch.blocks as fb

WORDS = {
    "english": """one two three four five six seven eight nine ten monday tuesday wednesday thursday friday saturday
        sunday january february march april june july august october december house water bread mother father brother
        sister school window through thought should would there where which because night light right the with from
        have been that this what when they them their about after before again always never something everything
        nothing people woman child friend year week month morning evening summer winter spring yesterday tomorrow
        today green yellow white black brown""",
    "german": """eins zwei drei vier fünf sechs sieben acht neun zehn montag dienstag mittwoch donnerstag freitag
        samstag sonntag januar februar märz mai juni juli oktober dezember haus wasser brot mutter vater bruder
        schwester schule fenster durch gedanke sollte würde dort welche weil nacht licht recht der die das mit von
        haben gewesen dass dieser wenn sie ihnen ihre über nach vor wieder immer niemals etwas alles nichts leute frau
        kind freund jahr woche monat morgen abend sommer frühling gestern heute grün gelb weiß schwarz braun""",
    "french": """un deux trois quatre cinq six sept huit neuf dix lundi mardi mercredi jeudi vendredi samedi dimanche
        janvier février mars avril juin juillet août octobre décembre maison eau pain mère père frère soeur école
        fenêtre travers pensée devrait serait quelle parce nuit lumière droit le la les avec depuis avoir été que cette
        quand ils leur après avant encore toujours jamais quelque chose tout rien gens femme enfant ami année semaine
        mois matin soir été hiver printemps hier demain aujourd'hui vert jaune blanc noir brun""",
    "spanish": """uno dos tres cuatro cinco seis siete ocho nueve diez lunes martes miércoles jueves viernes sábado
        domingo enero febrero marzo abril junio julio agosto octubre diciembre casa agua pan madre padre hermano hermana
        escuela ventana través pensamiento debería sería dónde cual porque noche luz derecho el los las con desde haber
        sido que esto cuando ellos sobre después antes otra siempre nunca algo todo nada gente mujer niño amigo año
        semana mes mañana tarde verano invierno primavera ayer hoy verde amarillo blanco negro""",
    "dutch": """een twee drie vier vijf zes zeven acht negen tien maandag dinsdag woensdag donderdag vrijdag zaterdag
        zondag januari februari maart april juni juli augustus oktober december huis water brood moeder vader broer
        zuster school raam door gedachte zou waar welke omdat nacht licht recht de het met van hebben geweest dat deze
        wanneer zij hun over na voor opnieuw altijd nooit iets alles niets mensen vrouw kind vriend jaar week maand
        ochtend avond zomer winter lente gisteren morgen vandaag groen geel wit zwart bruin""",
}
LANGUAGES = tuple(WORDS)
LETTERS = sorted(dict.fromkeys("".join(WORDS.values()).replace("\n", " ")))


class Layers:
    """Letter vectors, a cell a direction, the logits."""

    def __init__(self, d: int = 32, hidden: int = 48) -> None:
        self.letter = fb.Embedding(len(LETTERS) + 1, d, initializer=nn.init.normal_)
        self.forwards, self.backwards = nn.GRUCell(d, hidden), nn.GRUCell(d, hidden)
        self.logits = fb.FC(len(LANGUAGES), activation=None)


# [blocks
def build(layers: Layers) -> fb.Block:
    """The model: PyObjectType (word, language) -> (loss, logits)."""
    letter = fb.InputTransform(_number) >> fb.Scalar("int64") >> layers.letter
    last = [fb.RNN(cell) >> fb.GetItem(1) for cell in (layers.forwards, layers.backwards)]
    both = fb.Map(letter) >> fb.AllOf(last[0], fb.Slice(step=-1) >> last[1]) >> fb.Concat()
    label = fb.InputTransform(LANGUAGES.index) >> fb.Scalar("int64")
    return (both >> layers.logits, label) >> fb.AllOf(fb.Function(F.cross_entropy), fb.GetItem(0))


# blocks]


# [plain
def plain(layers: Layers, instance: tuple[str, str]) -> tuple[torch.Tensor, torch.Tensor]:
    """The model in plain PyTorch, for one word."""
    word, language = instance
    letters = [layers.letter(torch.tensor(_number(c))) for c in word]
    ends = []
    for cell, order in ((layers.forwards, letters), (layers.backwards, letters[::-1])):
        h = torch.zeros(cell.hidden_size, dtype=layers.letter.weight.dtype)
        for x in order:
            h = cell(x, h)
        ends.append(h)
    logits = layers.logits(torch.cat(ends))
    return F.cross_entropy(logits, torch.tensor(LANGUAGES.index(language))), logits


# plain]


def _number(letter: str) -> int:
    return LETTERS.index(letter) if letter in LETTERS else len(LETTERS)


def read_words(seed: int = 0) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Training and held-out (word, language) pairs; words of more than one language are left out."""
    languages: dict[str, list[str]] = {}
    for language, words in WORDS.items():
        for word in dict.fromkeys(words.split()):
            languages.setdefault(word, []).append(language)
    pairs = [(w, found[0]) for w, found in languages.items() if len(found) == 1]
    random.Random(seed).shuffle(pairs)
    held = len(pairs) // 6
    return pairs[held:], pairs[:held]


def minibatch(instances: int = 8, seed: int = 0) -> tuple[nn.Module, list[tuple[str, str]]]:
    """A model and the first training words with their languages."""
    torch.manual_seed(seed)
    return fb.compile(build(Layers())), read_words(seed)[0][:instances]


def main(argv: Sequence[str] | None = None) -> float:
    """Train, and print the accuracy on held-out words."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=25)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    training, held = read_words()
    model = fb.compile(build(Layers()))
    fit(model, training, epochs=options.epochs, batch=32, lr=5e-3)
    found = accuracy(model, held, [LANGUAGES.index(language) for _, language in held])
    console.print(f"accuracy on {len(held)} held-out words: {found:.3f} (5 languages)")
    return found


if __name__ == "__main__":
    main()
