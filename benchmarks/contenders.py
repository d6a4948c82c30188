"""Contenders of a case: a model decorated anew with options, its undecorated loop, hand-batched modules.

In: a model of models.py or of the examples, and Batches. Out: Contenders for measure.py, which all run the
same minibatch in a round, each round another one, so that nobody profits from having met a structure before.

    work = Training(model, batches)
    [work.one_by_one(), work.batched("fxbatch"), work.by_hand("by hand", LevelTreeLSTM(model))]
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

import fxbatch
from benchmarks.measure import Clock, Contender
from benchmarks.models import losses_once

Instance = TypeVar("Instance")


class Batches(Generic[Instance]):
    """Minibatches by round, made when a round first asks; the last ones are kept, `kept` of them."""

    def __init__(self, make: Callable[[int], list[Instance]], kept: int = 1) -> None:
        self.make = make
        self.kept = kept
        self._made: dict[int, list[Instance]] = {}

    @staticmethod
    def of(instances: Sequence[Instance], size: int) -> Batches[Instance]:
        """Slices of `size` instances, round after round; from the start again where they are used up."""
        count = max(1, len(instances) // size)
        return Batches(lambda number: list(instances[(number % count) * size : (number % count + 1) * size]))

    def __getitem__(self, number: int) -> list[Instance]:
        if number not in self._made:
            while len(self._made) >= self.kept:
                del self._made[next(iter(self._made))]
            self._made[number] = self.make(number)
        return self._made[number]

    def prepare(self, number: int) -> None:
        """Make the minibatch of a round; for Contender.prepare."""
        self[number]


def decorated(model: nn.Module, method: str, **options: Any) -> Callable[[Sequence[Any]], Any]:
    """A decorated method of the model's class, bound to the model, decorated anew with other options.

    Batched from the first minibatch on, unless told: with `adaptive` the first dozens may run the plain loop, until
    building the graphs is earned, and few rounds would time that.
    """
    options.setdefault("adaptive", False)
    fn = undecorated(model, method)
    options.setdefault("out", getattr(type(model), method).__fxbatch__.options.out)
    batched = fxbatch.autobatch(**options)(fn)
    return lambda batch: batched(model, batch)


def undecorated(model: nn.Module, method: str) -> Callable[..., Any]:
    """The function under the decorator: takes the model and one instance."""
    found: Callable[..., Any] = getattr(type(model), method).__wrapped__
    return found


# What `sampled_loop` is called in reports: it says how it was timed.
SAMPLED = "one by one, embedding in the loop (2 instances, scaled by words)"
Gradients = Callable[[], dict[str, Tensor | None]]
Looks = Sequence[tuple[nn.Embedding, Sequence[Tensor]]]  # embeddings and what a minibatch looks up in them


@contextlib.contextmanager
def looked_up_once(looks: Looks) -> Iterator[None]:
    """Within it the embeddings give rows of one lookup, by the identity of the number's tensor.

    Eager is else made slow by a dense gradient of the whole table for each word.
    """
    for embedding, numbers in looks:
        distinct = list({id(number): number for number in numbers}.values())
        if distinct:
            rows = dict(zip(map(id, distinct), embedding(torch.stack(distinct)).unbind(), strict=True))
            embedding.forward = lambda number, rows=rows: rows[id(number)]  # type: ignore[method-assign]
    try:
        yield
    finally:
        for embedding, _ in looks:
            embedding.__dict__.pop("forward", None)


@dataclass(frozen=True)
class Training:
    """Forward and backward of a loss, and with `update` a step of the optimizer after it.

    The outcome is the summed loss and the gradient of every parameter.
    """

    model: nn.Module
    batches: Batches[Any]
    method: str = "loss"
    update: float | None = None  # learning rate of plain SGD

    def one_by_one(self, name: str = "one by one") -> Contender:
        """The undecorated loss in a loop, the embedding looked up once a minibatch. Needs `losses_once`."""
        return self.contender(name, lambda batch: losses_once(self.model, batch).sum())

    def loop(self, name: str = "one by one, embedding in the loop") -> Contender:
        """The undecorated loss in a loop, as `fxbatch.disabled()` runs it."""
        fn = undecorated(self.model, self.method)
        return self.contender(name, lambda batch: torch.stack([fn(self.model, x) for x in batch]).sum())

    def sampled_loop(
        self, words: Callable[[Any], int], one: Callable[[Training], Contender], name: str = SAMPLED
    ) -> list[Contender]:
        """`loop` on the first two instances of a minibatch, its seconds times the words of all over theirs.

        A dense gradient of the whole embedding table for every word takes minutes for a whole minibatch.
        words(instance): the lookups in the table. one(training): whom the loop's outcome is compared with;
        nothing else is done with it. Both are a group of their own.
        """
        few = Batches(lambda number: self.batches[number][:2])

        def factor(number: int) -> float:
            whole = self.batches[number]
            return sum(map(words, whole)) / sum(map(words, whole[:2]))

        small = replace(self, batches=few)
        loop = replace(small.loop(name), limit=1, group=name, factor=factor)
        return [loop, replace(one(small), name=f"{name}: looked up once", limit=0, group=name)]

    def looked_up(self, looks: Callable[[Sequence[Any]], Looks], name: str = "one by one") -> Contender:
        """The undecorated loss in a loop, what `looks` says looked up once a minibatch."""
        fn = undecorated(self.model, self.method)

        def loss(batch: Sequence[Any]) -> Tensor:
            with looked_up_once(looks(batch)):
                return torch.stack([fn(self.model, x) for x in batch]).sum()

        return self.contender(name, loss)

    def batched(self, name: str = "fxbatch", **options: Any) -> Contender:
        """The decorated loss, with options."""
        run = decorated(self.model, self.method, **options)
        return self.contender(name, lambda batch: run(batch).sum())

    def by_hand(self, name: str, hand: Any) -> Contender:
        """A module with `loss(batch)`, the sum; with `gradients()` where it has parameters of its own."""
        return self.contender(name, hand.loss, getattr(hand, "gradients", None), hand)

    def contender(
        self,
        name: str,
        loss: Callable[[Sequence[Any]], Tensor],
        gradients: Gradients | None = None,
        module: nn.Module | None = None,
    ) -> Contender:
        """Anything that gives the summed loss of a minibatch."""
        trained = module or self.model
        parameters = list(trained.parameters())
        optimizer = None if self.update is None else torch.optim.SGD(parameters, self.update)

        def run(clock: Clock) -> None:
            batch = self.batches[clock.round]
            for parameter in parameters:
                parameter.grad = None
            with clock("forward"):
                total = loss(batch)
            with clock("backward"):
                total.backward()
            if optimizer is not None:
                with clock("update"):
                    optimizer.step()

        def outcome() -> dict[str, Tensor]:
            for parameter in [*parameters, *self.model.parameters()]:
                parameter.grad = None
            total = loss(self.batches[0])
            total.backward()
            found = (
                {n: p.grad for n, p in self.model.named_parameters()} if gradients is None else gradients()
            )
            dense = {n: g.detach().to_dense() for n, g in found.items() if g is not None}
            tensors = {f"gradient of {n}": g.clone() for n, g in dense.items()}
            return {"loss": total.detach().clone(), **tensors}

        return Contender(name, run, outcome, self.batches.prepare)


@dataclass(frozen=True)
class Inference:
    """Forward under no_grad, the model in eval mode. The outcome is the results, put together."""

    model: nn.Module
    batches: Batches[Any]
    method: str = "forward"

    def one_by_one(self, name: str = "one by one") -> Contender:
        """The undecorated forward in a loop, the embedding looked up once. Needs `scores_once`."""
        return self.contender(name, lambda batch: scores_once(self.model, batch))

    def loop(self, name: str = "one by one, embedding in the loop") -> Contender:
        """The undecorated forward in a loop, as `fxbatch.disabled()` runs it."""
        fn = undecorated(self.model, self.method)
        return self.contender(name, lambda batch: [fn(self.model, x) for x in batch])

    def batched(self, name: str = "fxbatch", **options: Any) -> Contender:
        """The decorated forward, with options."""
        return self.contender(name, decorated(self.model, self.method, **options))

    def by_hand(self, name: str, hand: Callable[[Sequence[Any]], Any]) -> Contender:
        """Anything that takes a minibatch and gives its results."""
        return self.contender(name, hand)

    def contender(self, name: str, forward: Callable[[Sequence[Any]], Any]) -> Contender:
        def run(clock: Clock) -> None:
            with torch.no_grad():
                forward(self.batches[clock.round])

        def outcome() -> dict[str, Tensor]:
            with torch.no_grad():
                return {"result": joined(forward(self.batches[0])).clone()}

        return Contender(name, run, outcome, self.batches.prepare)


def joined(result: Any) -> Tensor:
    """All tensors of a result, one after the other, as rows of their last dimension."""
    if isinstance(result, Tensor):
        return result.detach().reshape(-1, result.shape[-1] if result.dim() else 1)
    return torch.cat([joined(part) for part in result])


def scores_once(model: Any, trees: Sequence[Any]) -> Tensor:
    """Scores `[trees, classes]` of roots, one tree after the other, the embedding looked up once for all."""
    words = [model.words_of(tree) for tree in trees]
    rows = iter(model.embed(torch.stack([word for tree in words for word in tree])).unbind())
    scores = []
    for tree, own in zip(trees, words, strict=True):
        scores.append(model.out(model.encode(tree, iter([next(rows) for _ in own]))[0]))
    return torch.stack(scores)
