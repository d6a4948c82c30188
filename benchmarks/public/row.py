"""The figures of one public model in one mode, beside the plain loop; in a process of its own, for its first call.

In: `python -m benchmarks.public.row benchmarks.public.models.rnng:MODEL --mode training`. Out: a line of JSON.

    {"numbers": {"loop": 310.2, "speed": 4.1, ...}, "failures": {"values": "minibatch 2: ..."}, "notes": {...}}
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import random
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.driver import describe
from benchmarks.public.model import Driver, PublicModel, find_model
from fxbatch import FxbatchError, autobatch
from fxbatch.checking import Material, Outcome, double_by_default, judge
from fxbatch.torch_private import tree_flatten

RATE = 1e-3  # of the SGD steps
MODES = ("training", "inference")
FEWEST = 2  # minibatches that are timed whatever they take, and one more


@dataclass(frozen=True)
class Size:
    """Instances a minibatch; minibatches from the first one on, warm ones after them, compared ones."""

    batch: int = 32
    first: int = 30
    warm: int = 7
    compared: int = 5
    seconds: float = 40.0  # of the first ones, and of the warm ones, at most

    @staticmethod
    def quick() -> Size:
        return Size(batch=3, first=2, warm=1, compared=2, seconds=5.0)


@dataclass
class Figures:
    """numbers by name; failures: what raised or differs; notes: what ran instead, in words."""

    numbers: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def measure(model: PublicModel, mode: str, size: Size) -> Figures:
    """All figures of a row."""
    figures = Figures()
    with model.source.imported() as load, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        driver = model.build(load)
        try:
            time_beside_the_loop(model, driver, mode, size, figures)
        except Exception as error:  # noqa: BLE001 - the comparison is made all the same
            figures.failures["run"] = describe(error)
        try:
            compare_with_the_loop(model, driver, mode, size, figures)
        except Exception as error:  # noqa: BLE001 - what was timed must not be lost
            figures.failures["comparison"] = describe(error)
    return figures


# -- time ---------------------------------------------------------------------------------------------


def time_beside_the_loop(model: PublicModel, driver: Driver, mode: str, size: Size, figures: Figures) -> None:
    """Minibatch by minibatch on new data, both on the same, taking turns; CPU time of the process."""
    loop, ours = plain(driver, mode), decorated(model, driver, mode)
    numbers = figures.numbers
    theirs_all: list[float] = []
    ours_all: list[float] = []
    started = time.perf_counter()
    memory = 0
    turns = ((loop, theirs_all), (ours, ours_all))
    first = size.first
    for number in range(size.first + size.warm):
        late = time.perf_counter() - started > size.seconds
        if number == first or (number < first and number > FEWEST and late):
            first, started = number, time.perf_counter()
        elif number > first + FEWEST and (late or number == first + size.warm):
            break
        batch = driver.instances(number, size.batch)
        for run, times in turns if number % 2 == 0 else turns[::-1]:
            times.append(run.seconds(batch))
            memory = memory or peak_bytes()
    numbers["counted"] = first
    numbers["loop"] = statistics.median(theirs_all[first:]) * 1e3
    numbers["speed"] = 1 / statistics.median(
        a / b for a, b in zip(ours_all[first:], theirs_all[first:], strict=True)
    )
    numbers["first"] = ours_all[0] - theirs_all[0]
    numbers["begin"] = sum(ours_all[:first]) / sum(theirs_all[:first])
    numbers["memory"] = (peak_bytes() - memory) / 2**20
    numbers["long"] = long_calls(ours.module, driver.instances(size.first + size.warm, size.batch))
    numbers["edits"] = model.forced


@dataclass
class Contender:
    """A module and how a minibatch goes through it."""

    module: nn.Module
    call: Callable[[Sequence[tuple[Any, ...]]], Sequence[Any]]
    training: bool
    optimizer: torch.optim.Optimizer

    def seconds(self, batch: Sequence[tuple[Any, ...]]) -> float:
        """CPU time of one minibatch: in training with backward and the optimizer's step."""
        enabled = gc.isenabled()
        gc.collect()
        gc.disable()  # what a collection finds is of all that ran before
        seed()
        try:
            begin = time.process_time()
            with torch.set_grad_enabled(self.training):
                results = self.call(batch)
                if self.training:
                    total(results).backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            return time.process_time() - begin
        finally:
            if enabled:
                gc.enable()


def plain(driver: Driver, mode: str) -> Contender:
    """The loop over the instances, as it is written."""
    module = made(driver, mode)
    return contender(module, lambda batch: [module(*one) for one in batch], mode)


def decorated(model: PublicModel, driver: Driver, mode: str, **options: Any) -> Contender:
    """The module, of a class whose forward is decorated."""
    module = made(driver, mode)
    kind = type(module)
    module.__class__ = type(
        kind.__name__, (kind,), {"forward": autobatch(**{**model.options, **options})(kind.forward)}
    )
    return contender(module, lambda batch: module(*zip(*batch, strict=True)), mode)


def made(driver: Driver, mode: str) -> nn.Module:
    seed()
    return driver.make().train(mode == "training")


def contender(module: nn.Module, call: Callable[[Sequence[tuple[Any, ...]]], Any], mode: str) -> Contender:
    parameters = [p for p in module.parameters() if p.requires_grad]
    return Contender(module, call, mode == "training", torch.optim.SGD(parameters, lr=RATE))


def total(results: Any) -> torch.Tensor:
    """The loss of a minibatch: the sum of all losses."""
    return (
        results.sum()
        if isinstance(results, torch.Tensor)
        else torch.stack([r.reshape(()) for r in results]).sum()
    )


def seed() -> None:
    """Seed all generators, so that both sides draw equal random numbers."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the one that public code draws from


def peak_bytes() -> int:
    """The most main memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def long_calls(module: nn.Module, batch: Sequence[tuple[Any, ...]]) -> float:
    """Calls of a warm minibatch that Python recorded, not the table of calls; -1 where nothing can be."""
    engine = type(module).forward.__fxbatch__.engine(module)  # type: ignore[attr-defined]
    function = type(module).__mro__[1].forward
    try:
        for _ in range(2):
            with torch.set_grad_enabled(module.training):
                run = engine.execution()
                recording = engine.record(function, [((module, *one), {}) for one in batch], run)
            engine.finish(run, recording, "list")
    except FxbatchError:
        return -1
    return recording.recorder.long_calls


# -- values ---------------------------------------------------------------------------------------------


def compare_with_the_loop(
    model: PublicModel, driver: Driver, mode: str, size: Size, figures: Figures
) -> None:
    """Values and gradients of a few minibatches, parameters updated between them; always batched where that goes.

    Numbers: equal, the largest error as a share of what is allowed (`fxbatch.checking`). After each minibatch both have
    the loop's parameters again, so that differences don't add up.
    """
    try:
        worst = compared(model, driver, mode, size, figures, adaptive=False)
    except FxbatchError as error:
        figures.notes["batched"] = describe(error)
        worst = compared(model, driver, mode, size, figures)
    figures.numbers["equal"] = worst


def compared(
    model: PublicModel, driver: Driver, mode: str, size: Size, figures: Figures, **options: Any
) -> float:
    loop, ours = plain(driver, mode), decorated(model, driver, mode, **options)
    worst = 0.0
    for number in range(size.compared):
        batch = driver.instances(1000 + number, size.batch)
        referee = in_double(loop, batch)
        found, wanted = outcome(ours, batch), outcome(loop, batch)
        judgement = judge(found, wanted, referee, coarsest=torch.finfo(torch.float32).eps)
        worst = max(worst, judgement.worst)
        if judgement.differences:
            key, first = next(iter(judgement.differences.items()))
            figures.failures["values"] = f"minibatch {number}, {key}: {first.message}"
            return float("inf")
        if loop.training:
            for one in (loop, ours):
                one.optimizer.step()
                one.optimizer.zero_grad()
            with torch.no_grad():
                for a, b in zip(ours.module.parameters(), loop.module.parameters(), strict=True):
                    a.copy_(b)
    return worst


def outcome(contender: Contender, batch: Sequence[tuple[Any, ...]]) -> Outcome:
    """Results and gradients of one minibatch; the gradients stay in the parameters."""
    seed()
    with torch.set_grad_enabled(contender.training):
        results = list(contender.call(batch))
        if contender.training:
            total(results).backward()
    leaves = [[x.detach() if isinstance(x, torch.Tensor) else x for x in tree_flatten(r)[0]] for r in results]
    gradients = {
        name: None if p.grad is None else p.grad.detach().clone()
        for name, p in contender.module.named_parameters()
    }
    return Outcome(leaves, gradients if contender.training else {})


def in_double(loop: Contender, batch: Sequence[tuple[Any, ...]]) -> Outcome | None:
    """The loop in float64; None where the code fixes its precision."""
    try:
        wide = Material(loop.module, batch, {}).copy(double=True)
        module = wide.owner
        twin = Contender(module, lambda b: [module(*one) for one in b], loop.training, loop.optimizer)
        with double_by_default():
            return outcome(twin, wide.instances)
    except Exception:  # noqa: BLE001 - any: it is others' code on types that it was not written for
        return None


# -- the process ----------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print the figures as one line of JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.public.row", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("model", help="package.module:NAME of a PublicModel")
    parser.add_argument("--mode", choices=MODES, default="training")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--warm", type=int)
    parser.add_argument("--first", type=int)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    size = Size.quick() if options.quick else Size()
    changed = {n: getattr(options, n) for n in ("batch", "warm", "first") if getattr(options, n) is not None}
    figures = measure(find_model(options.model), options.mode, dataclasses.replace(size, **changed))
    print(json.dumps(dataclasses.asdict(figures)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
