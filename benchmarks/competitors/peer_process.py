"""A peer in a process of its own, which does one minibatch whenever it is asked: its threads disturb nobody.

In: a peer's name and a module-level function that makes its model and minibatches there, the same as here.
Out: contenders whose seconds were taken in that process. PeerUnavailable with the reason where it can't begin.

    with PeerProcess("dynet", make_dynet, cell, settings, folder=build) as peer:
        contender = peer.contender("DyNet", "train", batches.prepare)
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, Self

import numpy as np
import torch

from benchmarks.competitors.peers import PeerUnavailable, find_peer
from benchmarks.measure import Clock, Contender


class Work(Protocol):
    """The work of a peer in its process."""

    def prepare(self, number: int) -> None:
        """Make that round's minibatch, outside the timing."""

    def run(self, kind: str, number: int) -> None:
        """The minibatch of round `number`; `kind`: "train" or "infer"."""

    def outcome(self, kind: str) -> dict[str, np.ndarray]:
        """The results of round 0, by name."""


Make = Callable[..., Work]  # takes the peer's adapter module, then what PeerProcess was given for it


class PeerError(RuntimeError):
    """A peer's process failed in a minibatch; the message is its own."""


class PeerProcess:
    """The process; within `with`, it waits for its next minibatch. folder: where the library is, if not installed."""

    def __init__(self, name: str, make: Make, *arguments: Any, folder: Path | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(theirs, name, folder, make, torch.get_num_threads(), *arguments), daemon=True
        )
        self.process.start()
        theirs.close()
        self._wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()
        self.process.join(timeout=10)
        if self.process.is_alive():
            self.process.kill()

    def contender(self, name: str, kind: str, prepare: Callable[[int], None] | None = None) -> Contender:
        """Whose run is what the work there does for a round."""

        def run(clock: Clock) -> None:
            clock.elsewhere = self._ask("run", kind, clock.round)

        def outcome() -> dict[str, torch.Tensor]:
            found: dict[str, np.ndarray] = self._ask("outcome", kind, 0)
            return {name: torch.from_numpy(values) for name, values in found.items()}

        return Contender(name, run, outcome, prepare)

    def _ask(self, *request: Any) -> Any:
        self.connection.send(request)
        return self._wait()

    def _wait(self) -> Any:
        try:
            good, answer = self.connection.recv()
        except EOFError:
            raise PeerError("its process has ended") from None
        if isinstance(answer, PeerUnavailable):
            raise answer
        if not good:
            raise PeerError(answer)
        return answer


def serve(
    connection: Connection, name: str, folder: Path | None, make: Make, threads: int, *arguments: Any
) -> None:
    """Answer requests from the other end until it is closed: (whether it went well, the answer or the reason)."""
    if folder is not None:
        sys.path.insert(0, str(folder))
    torch.set_num_threads(threads)
    try:
        adapter: ModuleType = find_peer(name)
    except PeerUnavailable as error:
        connection.send((False, error))
        return
    try:
        work = make(adapter, *arguments)
        connection.send((True, None))
        gc.collect()
        gc.freeze()  # as in `measure`
        while True:
            what, kind, number = connection.recv()
            connection.send((True, work.outcome(kind) if what == "outcome" else _timed(work, kind, number)))
    except EOFError:  # nobody asks any more
        return
    except Exception as error:  # noqa: BLE001 - told to who asked, who goes on without
        connection.send((False, f"{type(error).__name__}: {error}"))


def _timed(work: Work, kind: str, number: int) -> tuple[float, float]:
    """Wall and CPU seconds of a round."""
    work.prepare(number)
    gc.collect()
    gc.disable()
    try:
        cpu, wall = time.process_time(), time.perf_counter()
        work.run(kind, number)
        return time.perf_counter() - wall, time.process_time() - cpu
    finally:
        gc.enable()
