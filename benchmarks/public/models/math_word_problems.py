"""Goal-driven tree decoder for arithmetic word problems (Xie & Sun 2019): a text in, an expression tree out.

Training: the repository's decoder, taught the tree, with a batch of one. Inference: its own `evaluate_tree`, a beam of
3 over at most 8 symbols. Texts of 10 to 24 words with 2 to 4 numbers, hidden 128 (the repository has 512).
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

WORDS, OPERATORS, CONSTANTS, HIDDEN = 400, 5, 2, 128
FILE = "src/train_and_evaluate.py"

SOURCE = Source(
    "ShichaoSun/math_seq2tree",
    "d2310d08818ef073d75a3e736f2c0ee0c0aac02a",
    edits=(Edit(FILE, r"torch\.ByteTensor\(", "torch.BoolTensor(", "torch"),),
)


def build(load: Load) -> Driver:
    models, evaluate = load("src.models"), load("src.train_and_evaluate")

    class Solver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = models.EncoderSeq(WORDS, 128, HIDDEN, dropout=0.0)
            self.predict = models.Prediction(HIDDEN, OPERATORS, CONSTANTS, dropout=0.0)
            self.generate = models.GenerateNode(HIDDEN, OPERATORS, 128, dropout=0.0)
            self.merge = models.Merge(HIDDEN, 128, dropout=0.0)

        def forward(self, words: list[int], numbers: list[int], symbols: list[int]) -> Any:
            if self.training:
                return self.loss(words, numbers, symbols)
            language = SimpleNamespace(num_start=OPERATORS)
            parts = (self.encoder, self.predict, self.generate, self.merge)
            return evaluate.evaluate_tree(
                words, len(words), range(CONSTANTS), *parts, language, numbers, beam_size=3, max_length=8
            )

        def loss(self, words: list[int], numbers: list[int], symbols: list[int]) -> Tensor:
            outputs, problem = self.encoder(torch.LongTensor(words).unsqueeze(1), [len(words)])
            of_numbers = evaluate.get_all_number_encoder_outputs(outputs, [numbers], 1, len(numbers), HIDDEN)
            words_mask = torch.BoolTensor(1, len(words)).fill_(0)
            numbers_mask = torch.BoolTensor(1, len(numbers) + CONSTANTS).fill_(0)
            padding = torch.zeros(1, HIDDEN)
            nodes, done = [[models.TreeNode(problem)]], []
            left: list[Any] = [None]
            scores = []
            for symbol in symbols:
                number_score, operator, goal, context, embeddings = self.predict(
                    nodes, left, outputs, of_numbers, padding, words_mask, numbers_mask
                )
                scores.append(torch.cat((operator, number_score), 1))
                chosen = torch.LongTensor([symbol if symbol < OPERATORS else 0])
                left_goal, right_goal, label = self.generate(goal, chosen, context)
                nodes[0].pop()
                if symbol < OPERATORS:
                    nodes[0] += [models.TreeNode(right_goal), models.TreeNode(left_goal, left_flag=True)]
                    done.append(evaluate.TreeEmbedding(label[0].unsqueeze(0), False))
                else:
                    current = embeddings[0, symbol - OPERATORS].unsqueeze(0)
                    while done and done[-1].terminal:
                        sibling, above = done.pop(), done.pop()
                        current = self.merge(above.embedding, sibling.embedding, current)
                    done.append(evaluate.TreeEmbedding(current, True))
                left = [done[-1].embedding if done[-1].terminal else None]
            return F.cross_entropy(torch.cat(scores), torch.tensor(symbols))

    return Driver(Solver, instances)


def instances(number: int, count: int) -> list[tuple[Any, ...]]:
    """Words, places of the numbers among them, and a random expression in prefix order."""
    choose = random.Random(number)
    found = []
    for _ in range(count):
        words = [choose.randrange(1, WORDS) for _ in range(choose.randint(10, 24))]
        places = sorted(choose.sample(range(len(words)), choose.randint(2, 4)))
        found.append((words, places, expression(choose.randint(1, 4), CONSTANTS + len(places), choose)))
    return found


def expression(operators: int, numbers: int, choose: random.Random) -> list[int]:
    if not operators:
        return [OPERATORS + choose.randrange(numbers)]
    left = choose.randrange(operators)
    here = [choose.randrange(OPERATORS)]
    return [*here, *expression(left, numbers, choose), *expression(operators - 1 - left, numbers, choose)]


MODEL = PublicModel("GTS word problems", "tree decoder", SOURCE, build, {"out": "list"})
