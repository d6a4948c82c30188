"""What instances share besides modules' attributes, and change while one waits: each way differs in silence, as
docs/promises.md says; checks find it, and `adaptive="loop"` gives the loop's results."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import fxbatch
from fxbatch.checking import Material
from fxbatch.runtime.strategy import AdaptiveSwitch
from fxbatch.shared_state import SharedState
from tools.check import compare
from tools.run_target import Runnable

# What counts: `count(self)` before an instance waits, `counted(self)` after. In the loop the k-th instance finds k;
# batched, all have counted before the first goes on. `self.many` and `self.made` are what the model holds besides.
WAYS = {
    "a global": """
n = 0
def count(self):
    global n
    n += 1
def counted(self): return n
""",
    "a list that is a global": """
log = []
def count(self): log.append(1)
def counted(self): return len(log)
""",
    "a dictionary that is a global": """
state = {"n": 0}
def count(self): state["n"] += 1
def counted(self): return state["n"]
""",
    "a set that is a global": """
seen = set()
def count(self): seen.add(len(seen))
def counted(self): return len(seen)
""",
    "a queue that is a global": """
import collections
queue = collections.deque()
def count(self): queue.append(1)
def counted(self): return len(queue)
""",
    "a counter that is a global": """
import collections
counter = collections.Counter()
def count(self): counter.update("a")
def counted(self): return counter["a"]
""",
    "an object that is a global": """
class State: n = 0
state = State()
def count(self): state.n += 1
def counted(self): return state.n
""",
    "an object with slots": """
class State:
    __slots__ = ("n",)
state = State()
state.n = 0
def count(self): state.n += 1
def counted(self): return state.n
""",
    "a list within a dictionary within an object": """
class State: pass
state = State()
state.by_name = {"a": [[]]}
def count(self): state.by_name["a"][0].append(1)
def counted(self): return len(state.by_name["a"][0])
""",
    "a closure": """
def counter():
    n = 0
    def count(self):
        nonlocal n
        n += 1
    return count, lambda self: n
count, counted = counter()
""",
    "a list in a closure": """
def counter(log):
    return (lambda self: log.append(1)), (lambda self: len(log))
count, counted = counter([])
""",
    "a default argument": """
def count(self, log=[]):
    log.append(1)
    return len(log)
def counted(self): return len(count.__defaults__[0])
""",
    "a default argument by name": """
def count(self, *, state={"n": 0}):
    state["n"] += 1
def counted(self): return count.__kwdefaults__["state"]["n"]
""",
    "an attribute of a function": """
def count(self): count.n += 1
def counted(self): return count.n
count.n = 0
""",
    "an attribute of the class": """
def count(self): type(self).n += 1
def counted(self): return self.n
class_attributes = {"n": 0}
""",
    "a list of the class": """
def count(self): self.log.append(1)
def counted(self): return len(self.log)
class_attributes = {"log": []}
""",
    "an attribute of another class": """
class Settings:
    n = 0
    @classmethod
    def next(cls): cls.n += 1
def count(self): Settings.next()
def counted(self): return Settings.n
""",
    "an iterator": """
import itertools
numbers = itertools.count(1)
last = 0
def count(self):
    global last
    last = next(numbers)
def counted(self): return last
""",
    "an iterator over a list": """
numbers = {"it": iter(range(1, 1000)), "last": 0}
def count(self): numbers["last"] = next(numbers["it"])
def counted(self): return numbers["last"]
""",
    "a list handed to a helper": """
def append(to): to.append(1)
log = []
def count(self): append(log)
def counted(self): return len(log)
""",
    "a cache": """
cache = {}
def once(f):
    def cached(*args): return cache.setdefault(len(cache), f(*args))
    return cached
@once
def count(self): return 1
def counted(self): return len(cache)
""",
    "an array of numpy": """
import numpy
numbers = numpy.zeros(3)
def count(self): numbers[1] += 1
def counted(self): return float(numbers[1])
""",
    "a tensor that is a global": """
import torch
number = torch.zeros(())
def count(self): number.add_(1)
def counted(self): return float(number)
""",
    "random numbers of an own generator": """
import random
numbers = random.Random(0)
def count(self): numbers.random()
def counted(self): return 1 + numbers.random()
""",
    "__dict__ of a module": """
attributes = {"n": 0}
def count(self): vars(self)["n"] += 1
def counted(self): return self.n
""",
    "object.__setattr__ of a module": """
attributes = {"n": 0}
def count(self): object.__setattr__(self, "n", self.n + 1)
def counted(self): return self.n
""",
    "one object in all instances": """
class State: n = 0
state_of_instances = State()
def count(self, state): state.n += 1
def counted(self, state): return state.n
""",
    "one list in all instances": """
state_of_instances = []
def count(self, state): state.append(1)
def counted(self, state): return len(state)
""",
}  # fmt: skip

# What a minibatch sees, as it sees modules' attributes: it is refused, and the loop runs.
SEEN = {
    "an object that a module holds": """
class State: n = 0
attributes = {"state": State()}
def count(self): self.state.n += 1
def counted(self): return self.state.n
""",
    "a list within a list that a module holds": """
attributes = {"logs": [[]]}
def count(self): self.logs[0].append(1)
def counted(self): return len(self.logs[0])
""",
    "a list of an object that a module holds": """
class Tree:
    def __init__(self, below): self.found, self.below = [], below
attributes = {"tree": Tree([Tree([]), Tree([])])}
def count(self): self.tree.below[1].found.append(1)
def counted(self): return len(self.tree.below[1].found)
""",
    "an attribute of an object that is replaced": """
class State:
    def __init__(self): self.log = []
attributes = {"state": State()}
def count(self): self.state.log = [*self.state.log, 1]
def counted(self): return len(self.state.log)
""",
}  # fmt: skip

FORWARD = """
def forward(self, x, state=None):
    given = () if state is None else (state,)
    count(self, *given)
    h = self.l(x)
    if h.sum() > 1e9:
        h = h * 2
    return h * counted(self, *given)
"""


def made(way: str, **options: Any) -> tuple[Any, list[Any]]:
    """A model that counts in this way, and its instances."""
    torch.manual_seed(0)
    world: dict[str, Any] = {"__name__": "world"}
    exec(compile({**WAYS, **SEEN}[way] + FORWARD, "<world>", "exec"), world)  # our own table
    members = {"forward": fxbatch.autobatch(out="list", **options)(world["forward"])}
    model = type("Model", (torch.nn.Module,), {**members, **world.get("class_attributes", {})})()
    model.l = torch.nn.Linear(4, 4)
    for name, x in world.get("attributes", {}).items():
        setattr(model, name, x)
    xs = list(torch.randn(3, 4))
    shared = world.get("state_of_instances")
    return model, xs if shared is None else [fxbatch.decorator.InstanceArguments((x, shared)) for x in xs]


def run(model: Any, instances: list[Any]) -> list[torch.Tensor]:
    columns = zip(*instances, strict=True) if isinstance(instances[0], tuple) else [instances]
    found: list[torch.Tensor] = model(*map(list, columns))
    return found


def looped(way: str, times: int) -> list[list[torch.Tensor]]:
    model, instances = made(way)
    with fxbatch.disabled():
        return [run(model, instances) for _ in range(times)]


def different(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[int]:
    return [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if not torch.allclose(x, y, rtol=1e-4)]


def test_there_are_25_at_least() -> None:
    assert len(WAYS) >= 25


@pytest.mark.parametrize("way", WAYS)
def test_it_differs_in_silence_and_checks_find_it(way: str) -> None:
    expected, again = looped(way, 2)
    plain, instances = made(way, adaptive=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, second = run(plain, instances), run(plain, instances)
    wrong = different(found, expected)
    assert wrong
    # By the option: the call is left as it is unchecked, so that the second one gives what it gave.
    checked, instances = made(way, adaptive=False, check=100)
    with pytest.raises(fxbatch.DifferenceError) as caught:
        run(checked, instances)
    assert caught.value.instance == wrong[0]
    assert f"instance {wrong[0]}, tensor 0 of its result: error" in str(caught.value)
    assert not different(run(checked, instances), second)
    # By the command.
    model, instances = made(way)
    target = Runnable.of(model, {})
    material = Material.of(model, instances).copy()
    comparison = compare(target, material, SharedState.of(target.decorated.fn, model))
    assert not comparison.unrepeatable and comparison.instances[0] == wrong[0]
    # The loop, where it is asked for, is right.
    model, instances = made(way, adaptive="loop")
    assert not different(run(model, instances), expected)
    assert not different(run(model, instances), again)


@pytest.mark.parametrize("way", SEEN)
def test_what_is_seen_runs_the_loop(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, again = looped(way, 2)
    model, instances = made(way, adaptive=False)
    with pytest.raises(fxbatch.TraceError, match="is changed, and an instance waits"):
        run(model, instances)
    monkeypatch.setattr(AdaptiveSwitch, "on", True)
    model, instances = made(way)
    with pytest.warns(fxbatch.LoopWarning, match="is changed, and an instance waits"):
        found, second = run(model, instances), run(model, instances)
    assert not different(found, expected)
    assert not different(second, again)
