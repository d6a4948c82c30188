"""Every task runs at its quick size, its competitors agree, and its tables and plots are made."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fxbatch
from benchmarks.compiled_levels import CompiledLevels
from benchmarks.contenders import Batches, Inference, Training, decorated, joined, looked_up_once
from benchmarks.driver import run_tasks
from benchmarks.measure import Clock
from benchmarks.models import TreeLSTM, random_trees
from benchmarks.public.sources import VARIABLE
from benchmarks.registry import TASKS
from benchmarks.report import to_html, to_markdown
from benchmarks.results import RunResult
from benchmarks.side_by_side import show, tree_contenders, update_contenders
from benchmarks.stages import NAMES, stage_times, staged
from benchmarks.task import Settings, Task
from benchmarks.tasks import never_slower, public
from benchmarks.tasks.neubig_figure_2 import phases_of
from tests.benchmarks import stand_in

# One timed round, none to warm up: that everything works is what is tested here, not its speed.
SETTINGS = Settings(quick=True, repeats=1, warmup=0, peers=False, compiled=False)


# What rows of `never-slower` choose is tested for all of them in tests/runtime/test_strategy.py.
SOME_ROWS = ("embed, MLP, mean", "CRF forward", "pointer network", "floats that differ", "Tree-LSTM")


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_task_runs_and_its_competitors_agree(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(never_slower, "ROWS", {name: never_slower.ROWS[name] for name in SOME_ROWS})
    monkeypatch.setattr(public, "MODELS", ("tests.benchmarks.stand_in:MODEL",))
    monkeypatch.setattr(public, "MODES", ("training",))  # a process a mode; test_public.py measures both
    monkeypatch.setenv(VARIABLE, str(stand_in.FOLDER))
    run = run_tasks([task], SETTINGS, command="test")
    (result,) = run.tasks
    assert run.failures == []
    assert result.skipped == ""
    assert result.cases and result.tables
    assert all(table.rows for table in result.tables)
    assert RunResult.from_json(run.to_json()).tasks[0].name == task.name
    assert task.title in to_markdown(run) and len(to_html(run)) > 1000
    several = [case for case in result.cases if len(case.entries) > 1 and task.name not in ("figures",)]
    assert all(case.checked for case in several)


def test_tasks_have_names_of_their_own() -> None:
    assert len({task.name for task in TASKS}) == len(TASKS)


def small() -> tuple[TreeLSTM, Batches]:
    model = TreeLSTM(20, embedding=4, hidden=4)
    return model, Batches(lambda number: random_trees(3, leaves=4, words=20, seed=number))


def test_batches_are_new_each_round_and_the_same_within() -> None:
    made: list[int] = []
    batches = Batches(lambda number: made.append(number) or [number])
    assert [batches[0], batches[0], batches[1], batches[1], batches[0]] == [[0], [0], [1], [1], [0]]
    assert made == [0, 1, 0]
    assert [Batches.of(range(7), 3)[i] for i in range(3)] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


def test_contenders_of_training_agree_and_a_wrong_one_does_not() -> None:
    model, batches = small()
    train = Training(model, batches)
    wanted = train.loop().outcome()
    for contender in (train.one_by_one(), train.batched(), train.batched("depth", schedule="depth")):
        found = contender.outcome()
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    twice = train.contender("twice", lambda batch: 2 * model.loss(batch).sum()).outcome()
    assert not torch.allclose(twice["loss"], wanted["loss"])


def test_update_moves_the_parameters() -> None:
    model, batches = small()
    before = model.out.weight.detach().clone()
    contender = dataclasses.replace(Training(model, batches), update=0.1).batched()
    clock = Clock(torch.device("cpu"), 1)
    contender.run(clock)
    assert not torch.equal(model.out.weight, before)
    assert list(clock.phases) == ["forward", "backward", "update"]


def test_inference_contenders_agree() -> None:
    model, batches = small()
    infer = Inference(model, batches)
    wanted = infer.loop().outcome()["result"]
    assert wanted.shape == (3, 5)
    for contender in (infer.one_by_one(), infer.batched()):
        torch.testing.assert_close(contender.outcome()["result"], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # torch._dynamo's own
def test_compiled_levels_agree_with_the_loop() -> None:
    model, batches = small()
    train = Training(model, batches)
    wanted = train.loop().outcome()
    found = train.by_hand("compiled", CompiledLevels(model, backend="eager")).outcome()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_models_are_timed_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    show("Tree-LSTM, training", update_contenders("Tree-LSTM", Settings(quick=True)), 1)
    title, *rows = capsys.readouterr().out.splitlines()
    assert title == "Tree-LSTM, training"
    assert [row[:13].strip() for row in rows] == ["fxbatch", "by hand", "one by one"]
    assert rows[0].endswith(" 1.00 x fxbatch")


def test_contenders_side_by_side_do_the_same_work() -> None:
    found = tree_contenders(*small())
    for contenders in found.values():
        outcomes = [c.outcome() for c in contenders if c.outcome is not None]
        assert len(outcomes) == 3 and len({tuple(sorted(outcome)) for outcome in outcomes}) == 1
        for outcome in outcomes[1:]:
            for name, tensor in outcomes[0].items():
                torch.testing.assert_close(outcome[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_a_part_of_the_loop_is_scaled_by_words_and_held_against_the_lookup() -> None:
    model, _ = small()
    trees = [random_trees(1, leaves=n, words=20, seed=n)[0] for n in (2, 3, 7)]
    loop, checked = Training(model, Batches(lambda number: trees)).sampled_loop(
        lambda tree: (tree.nodes + 1) // 2, lambda train: train.one_by_one()
    )
    assert (loop.limit, checked.limit, loop.group == checked.group) == (1, 0, True)
    assert loop.factor is not None
    assert loop.factor(1) == (2 + 3 + 7) / (2 + 3)
    found, wanted = loop.outcome(), checked.outcome()  # type: ignore[misc]  # both have one
    with fxbatch.disabled():
        expected = model.loss(trees[:2]).sum()
    torch.testing.assert_close(found["loss"], expected)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_looked_up_once_gives_the_rows_and_goes_away() -> None:
    embedding = torch.nn.Embedding(5, 3)
    numbers = [torch.tensor(2), torch.tensor(4)]
    with looked_up_once([(embedding, [*numbers, numbers[0]])]):
        found = [embedding(number) for number in numbers]
        with pytest.raises(KeyError):
            embedding(torch.tensor(1))
    assert torch.equal(torch.stack(found), embedding.weight[[2, 4]])
    assert torch.equal(embedding(torch.tensor(1)), embedding.weight[1])


def test_joined() -> None:
    assert joined(torch.ones(2, 3)).shape == (2, 3)
    assert joined([torch.ones(3), torch.ones(3)]).shape == (2, 3)
    assert joined([[torch.ones(3)], [torch.ones(3), torch.ones(3)]]).shape == (3, 3)
    assert joined([torch.ones(1, 3), torch.ones(2, 3)]).shape == (3, 3)


def test_stages_are_timed_and_the_methods_put_back() -> None:
    model, batches = small()
    run = decorated(model, "loss")
    run(batches[0])
    with stage_times() as seconds:
        run(batches[1])
    assert list(seconds) == list(NAMES)
    assert all(value > 0 for value in seconds.values())
    seconds_after = dict(seconds)
    run(batches[2])
    assert seconds == seconds_after
    clock = Clock(torch.device("cpu"), 3)
    staged(Training(model, batches).batched()).run(clock)
    assert set(NAMES) < clock.phases.keys()
    assert phases_of(clock.phases).keys() == {"construction", "scheduling", "forward", "backward"}
