"""How long things take: a passage of code with the backward pass of what it gives, and what is built once, apart.

    timing = Timing(instances=4)
    results = timing.of(lambda: [forward(x) for x in instances])
    sum(results).backward()
    timing.forward, timing.backward         # seconds; of what was built in `building()`, none

The one place of the package that reads a clock to choose by; tests put another function in place of `now`.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from fxbatch.torch_private import graph_task, next_sequence_number, sequence_number, tree_leaves

T = TypeVar("T")
FINE = 1e-5  # seconds: a coarser clock says nothing of a call


def now() -> float:
    """Seconds: of this thread alone where torch computes on one, so that nothing else that runs on the machine counts;
    of the wall otherwise, once what was launched on CUDA is done."""
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
    return _clock()()


@functools.cache
def _clock() -> Callable[[], float]:
    """The clock of the process, from the first time on that it is read."""
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    is_fine = time.get_clock_info("thread_time").resolution < FINE
    return time.thread_time if alone and is_fine else time.perf_counter


def is_alone() -> bool:
    """Whether nothing else that runs on the machine counts."""
    return _clock() is time.thread_time


class _Building(threading.local):
    seconds = 0.0
    depth = 0
    late = 0.0  # that calls took one by one of what is not built yet, beyond what they take once it is


_building = _Building()


@contextmanager
def building() -> Iterator[None]:
    """Around what is made once and used for good: graphs, kernels, packed forms, imports for them."""
    begun = now()
    _building.depth += 1
    try:
        yield
    finally:
        _building.depth -= 1
        if not _building.depth:
            _building.seconds += now() - begun


def count_late(seconds: float) -> None:
    """Calls of what is not built yet took so much longer."""
    _building.late += seconds


def seconds_of_building() -> float:
    """The seconds that this thread has spent in `building()` until now."""
    return _building.seconds


@dataclass
class Timing:
    """Seconds that some instances took: forward, and backward as far as it has run."""

    instances: int
    forward: float = 0.0
    backward: float = 0.0
    building: float = 0.0  # besides
    late: float = 0.0  # of both, beyond what they take once all is built

    def of(self, run: Callable[[], T], *, apart: bool = False) -> T:
        """The result of `run`, whose time is added, as will be that of backward passes through the result. apart: it is
        a list of results that may go backward one by one, each of as many instances."""
        first = next_sequence_number()
        result = self.forward_of(run)
        if torch.is_grad_enabled():
            self._await_backward(list(result) if apart and isinstance(result, list) else [result], first)
        return result

    def forward_of(self, run: Callable[[], T]) -> T:
        """The result of `run`, whose time is added."""
        building, late, begun = seconds_of_building(), _building.late, now()
        result = run()
        seconds, building = now() - begun, seconds_of_building() - building
        self.forward += seconds - building
        self.building += building
        self.late += _building.late - late
        return result

    def _await_backward(self, results: list[Any], first: int) -> None:
        """Time backward passes from the first node of autograd's graph that `results` stand on to the last of those
        that are numbered from `first` on: autograd runs those that were made last first, and those of others before or
        after. Where some of the results go backward, the time is taken to be so much of the whole."""
        nodes: dict[Any, int] = {}
        roots: dict[Any, int] = {}  # the first result that stands on it, by number
        for i, result in enumerate(results):
            tensors = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            open_nodes: list[Any] = [x.grad_fn for x in tensors]
            for node in open_nodes:
                if node is not None and sequence_number(node) >= first:
                    roots.setdefault(node, i)
            while open_nodes:
                node = open_nodes.pop()
                if node is not None and node not in nodes and (number := sequence_number(node)) >= first:
                    nodes[node] = number
                    open_nodes += [before for before, _ in node.next_functions]
        if not nodes:
            return
        every = len(set(roots.values()))
        # By pass: when it began, what had been late until then, and of which results it is.
        passes: dict[int, tuple[float, float, set[int]]] = {}

        def begin(i: int, gradients: Any) -> None:
            task = graph_task()
            if task not in passes:
                passes[task] = now(), _building.late, set()
            passes[task][2].add(i)

        def end(inputs: Any, outputs: Any) -> None:
            ended = passes.pop(graph_task(), None)
            if ended is not None:
                begun, late, results = ended
                self.backward += (now() - begun) * every / len(results)
                self.late += (_building.late - late) * every / len(results)

        for root, i in roots.items():
            root.register_prehook(functools.partial(begin, i))
        min(nodes, key=nodes.__getitem__).register_hook(end)
