"""The ways to serve of examples/serve.py give the loop's results, and its table is printed."""

from __future__ import annotations

import pytest
import torch
from fxbatch_examples import serve

import fxbatch


def test_all_ways_give_what_the_loop_gives() -> None:
    model, requests = serve.minibatch(requests=12)
    with torch.no_grad():
        wanted = [serve.Decoder.forward.__wrapped__(model, x) for x in requests]  # type: ignore[attr-defined]
    with fxbatch.live(model, max_batch=4) as server:
        ways = (
            serve.one_at_a_time(model),
            serve.gathered(model, 4),
            serve.live(server),
            serve.by_hand(model, 4),
        )
        for way in ways:
            load, results = serve.offer(way, requests, 2000.0)
            assert results == wanted
            assert load.throughput > 0 and load.latency(0.5) <= load.latency(0.99)


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--requests", "8", "--hidden", "16"]) > 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:14].strip() for line in lines[1:]] == [
        "one at a time",
        "gathered",
        "live",
        "by hand, conti",
    ]
