"""Greenlets that run instances, kept from minibatch to minibatch.

    worker = take_worker(main)
    worker.switch(work)            # calls work(); in `main` again when that is done, or switches there

A fresh greenlet takes pages of the system for its frames: 6 us, and 25 where the caches are cold; one that is used
again 0.5 and 3. It lies on the C stack where it was first switched to: where the stack is that deep again, nothing of
`main` lies below, and it is used again; where it is deeper, a fresh one takes its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import greenlet

from fxbatch.trace.columns import _fast

_KEPT = 64  # a thread
_APART = 1 << 16  # bytes of stack at most between a worker and who uses it again


class Worker(greenlet.greenlet):
    """A greenlet that does one piece of work after another, each for the one who is its parent then."""

    stack = 0  # where the C stack was when it was made


class _Workers(threading.local):
    def __init__(self) -> None:
        self.idle: list[Worker] = []


_workers = _Workers()


def take_worker(main: greenlet.greenlet) -> Worker:
    """A worker of this thread whose work comes back to `main`."""
    stack, idle = 0 if _fast is None else _fast.stack_here(), _workers.idle
    while idle and stack:
        worker = idle.pop()
        if not worker.dead and 0 <= stack - worker.stack < _APART:
            worker.parent = main
            return worker
    worker = Worker(_serve, main)
    worker.stack = stack
    worker.switch()  # what a greenlet is started with it holds for good
    return worker


def _serve() -> None:
    work: Callable[[], None] | None = greenlet.getcurrent().parent.switch()
    while work is not None:
        if _fast is None:
            work()
        else:
            _fast.at_bottom(work)
        work = None  # it holds a minibatch
        me, idle = greenlet.getcurrent(), _workers.idle
        if not me.stack or len(idle) >= _KEPT:
            return
        me.gr_context = None
        idle.append(me)
        main = me.parent
        del me, idle  # they would hold themselves
        work = main.switch()
