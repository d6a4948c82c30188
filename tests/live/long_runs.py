"""Many requests of one recording that never ends, and what it holds on the way.

In: a number of requests. Out: samples of what the recording and the process hold.

    samples = serve(5000, model)
    assert_flat(samples)
"""

from __future__ import annotations

import asyncio
import gc
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import fxbatch
from fxbatch.trace import ongoing
from tests.trust.long_runs import resident_bytes

CLIENTS = 16
ENDLESS = 10**9


class Decoder(nn.Module):
    """Takes a state and a number of steps, and gives tokens until the one that ends (0), and the last state. `ENDLESS`
    steps are ended by somebody else alone, and their tokens are not kept. One of 13 steps may fail."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.cell, self.out = nn.Embedding(20, 8), nn.GRUCell(8, 8), nn.Linear(8, 20)

    @fxbatch.autobatch
    def forward(self, h: Tensor, steps: int) -> tuple[list[int], Tensor]:
        token, tokens = torch.tensor(1), list[int]()
        for _ in range(steps):
            h = self.cell(self.embed(token), h)
            token = self.out(h).argmax(-1)
            number = int(token)
            if steps == ENDLESS:
                continue
            tokens.append(number)
            if number == 0:
                break
            if number == 3 and steps == 13:
                raise ValueError("thirteen")
        return tokens, h


class Sample(NamedTuple):
    """What is held at a moment."""

    values: int  # of the recording, which somebody may refer to
    rows: int  # of all values that the run has
    calls: int  # that the recording has run, and not forgotten
    written: int
    resident: int  # bytes of the process


def serve(count: int, samples: int = 100) -> list[Sample]:
    """Serve so many requests beside one that never ends."""
    held: list[Sample] = []

    async def main() -> None:
        async with fxbatch.live(Decoder().eval(), max_batch=CLIENTS + 1) as ask:

            async def client(k: int) -> None:
                for i in range(count // CLIENTS):
                    await ask(torch.randn(8), 3 + (i + k) % 5)
                    if k == 0 and i % max(1, count // CLIENTS // samples) == 0:
                        gc.collect()
                        recording = ask._recording
                        if recording is not None:
                            run: Any = recording.execution
                            recorder = recording.recorder
                            calls = sum(len(sig) for sig, _ in list(recorder.phases.columns))
                            sizes = len(recorder.values), len(run.value_row), calls, len(recorder.written)
                            held.append(Sample(*sizes, resident_bytes()))

            for _ in range(3):
                await asyncio.gather(*[ask(torch.randn(8), 3) for _ in range(CLIENTS)])
            endless = asyncio.create_task(ask(torch.randn(8), ENDLESS))
            await asyncio.gather(*[client(k) for k in range(CLIENTS)])
            assert not endless.done()
            endless.cancel()

    with mock.patch.object(ongoing, "FEWEST", 500):
        asyncio.run(main())
    return held


def assert_flat(held: list[Sample]) -> None:
    """No more than a few phases' worth is held at any moment, and the process does not grow."""
    assert len(held) > 20
    assert max(s.values for s in held) < 4000 and max(s.rows for s in held) < 4000
    assert max(s.calls for s in held) < 4000 and max(s.written for s in held) == 0
    n = len(held)
    early, late = max(s.resident for s in held[n // 4 : n // 2]), max(s.resident for s in held[3 * n // 4 :])
    assert late <= early * 1.05 + (8 << 20), f"memory: {early >> 20} MB early, {late >> 20} MB late"
