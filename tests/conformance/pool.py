"""Workers in processes of their own: an entry that hangs or kills its process is a verdict, not the end.

for line in judged(names, workers=2, samples=None, seconds=60.0): ...
"""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

STARTING = 120.0  # seconds that a worker may take to import the databases
GRACE = 60.0  # seconds beyond the bound of an entry after which its process is ended


class Worker:
    """One process, started when it is needed and again when it died."""

    def __init__(self, samples: int | None, seconds: float) -> None:
        self.arguments = [str(samples or 0), str(seconds)]
        self.seconds = seconds
        self.process: subprocess.Popen[str] | None = None

    def _line(self, seconds: float) -> str | None:
        assert self.process is not None and self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        return self.process.stdout.readline() if ready else None

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.conformance.worker", *self.arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if self._line(STARTING) != "ready\n":
            raise RuntimeError(
                "a conformance worker doesn't start: run python -m tests.conformance.worker 1 10"
            )

    def judge(self, name: str, again: bool = True) -> dict[str, Any]:
        """The verdict on one entry; a process that dies is given a second chance."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()
        line = self._line(self.seconds + GRACE)
        if line:
            return json.loads(line)
        verdict, why = ("slow", "took too long") if line is None else ("crash", "its process died")
        self.stop()
        if again and verdict == "crash":
            return self.judge(name, again=False)
        return {
            "entry": name, "kind": name.split(":")[0], "verdict": verdict, "counts": {verdict: 1},
            "reasons": [why], "bad": [why], "left_out": 0, "seconds": self.seconds,
        }  # fmt: skip

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def judged(
    names: Sequence[str], *, workers: int, samples: int | None, seconds: float
) -> Iterator[dict[str, Any]]:
    """The verdicts as they come."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    stopped = threading.Event()

    def serve() -> None:
        worker = Worker(samples, seconds)
        try:
            while not stopped.is_set():
                answers.put(worker.judge(waiting.get_nowait()))
        except queue.Empty:
            answers.put(None)
        except Exception as error:  # noqa: BLE001 - raised in the thread that asked
            answers.put(error)
        finally:
            worker.stop()

    threads = [threading.Thread(target=serve) for _ in range(workers)]
    for thread in threads:
        thread.start()
    left = workers
    try:
        while left:
            answer = answers.get()
            if answer is None:
                left -= 1
            elif isinstance(answer, Exception):
                raise answer
            else:
                yield answer
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
