"""Batched against the undecorated loop: values and gradients, on copies, with a float64 run of the loop as referee.

    material = Material.of(owner, instances)           # the arguments of each instance, and what gets gradients
    loop = run_minibatch(material.copy(), call)        # an Outcome: results an instance, gradients by name
    judge(batched, loop, exact).differences            # {(instance, tensor) or gradient's name: Judged}

    @autobatch(check=100, check_gradients=True)        # one minibatch in 100: `checked` runs all of it

How far a batched tensor may be from the float64 run says `fxbatch.judge`. What the loop itself gives otherwise when it
runs again can't be compared, and is said to be so.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from fxbatch.errors import CheckWarning, DifferenceError, FxbatchError
from fxbatch.ir import Program, Schedule
from fxbatch.judge import (
    DRAWS,
    Draw,
    Judged,
    difference,
    differences,
    double_by_default,
    doubled,
    nudged,
)
from fxbatch.passes.plan import is_constant
from fxbatch.runtime.argument_objects import Instance
from fxbatch.runtime.engine import Engine
from fxbatch.runtime.run import Run, kernel_modes
from fxbatch.shared_state import SharedState
from fxbatch.signature import Signature
from fxbatch.torch_private import tree_flatten
from fxbatch.views import constant_tensor

SHOWN = 5  # differences in an error's text

Key = tuple[int, int] | str  # (instance, leaf of its result), or whose gradient
Prepared = Sequence[tuple[Program, Schedule]]


# -- one run ----------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The results and gradients of one run of a minibatch."""

    results: list[list[Any]]  # the leaves of each instance's result
    gradients: dict[str, Any] = field(default_factory=dict)  # by parameter or input; None where there is none

    def leaf(self, key: Key) -> Any:
        """A leaf of a result, or a gradient; None where it has no such."""
        if isinstance(key, str):
            return self.gradients.get(key)
        i, j = key
        return self.results[i][j] if i < len(self.results) and j < len(self.results[i]) else None


@dataclass
class Judgement:
    """One outcome against another; `differences` is empty where they are equal."""

    differences: dict[Key, Judged]
    worst: float  # the largest error of what is equal, as a share of what is allowed


def judge(
    batched: Outcome,
    loop: Outcome,
    exact: Outcome | None = None,
    draw: Callable[[int], tuple[Outcome, Outcome | None]] | None = None,
    *,
    coarsest: float = 0.0,
) -> Judgement:
    """Each leaf of each result, and each gradient. exact: the loop in float64. draw: by a seed the loop on other
    numbers, and its float64 run, where one gradient, or one number, may be exact by chance."""
    wrong: dict[Key, Judged] = {}
    if len(batched.results) != len(loop.results):
        text = f"{len(batched.results)} results, the loop has {len(loop.results)}"
        return Judgement({"the minibatch": Judged(text, math.inf, False)}, 0.0)
    keys: list[Key] = []
    for i, (ours, leaves) in enumerate(zip(batched.results, loop.results, strict=True)):
        if len(ours) == len(leaves):
            keys += [(i, j) for j in range(len(leaves))]
        else:
            text = f"a result of {len(ours)} parts, the loop's has {len(leaves)}"
            wrong[i, 0] = Judged(text, math.inf, False)
    keys += loop.gradients

    def drawn() -> Iterator[Draw]:
        for seed in range(DRAWS if draw is not None else 1):
            try:
                other, precise = (loop, exact) if draw is None or not seed else draw(seed)
            except Exception:  # noqa: BLE001  # the user's code, on numbers that it was not written for
                return
            if precise is None:
                return
            yield Draw([*map(other.leaf, keys)], [*map(precise.leaf, keys)])

    judged = differences(
        [*map(batched.leaf, keys)],
        [*map(loop.leaf, keys)],
        drawn(),
        kinds=[key if isinstance(key, str) else key[1] for key in keys],
        groups=[isinstance(key, str) for key in keys],
        coarsest=coarsest,
    )
    return Judgement({**wrong, **{keys[i]: one for i, one in judged.items()}}, judged.worst)


def coarsest_of(signatures: Iterable[Signature]) -> float:
    """The eps of the coarsest type that operations compute in, autocast included."""
    found = {dtype for s in signatures for _, dtype in s.modes.autocast}
    found |= {t.dtype for s in signatures for t in (*s.inputs, *s.outputs) if t.differentiable}
    return max((torch.finfo(dtype).eps for dtype in found), default=0.0)


def name_of(key: Key) -> str:
    """A key in words: `instance 3, tensor 0 of its result`."""
    if isinstance(key, str):
        return key
    return f"instance {key[0]}, tensor {key[1]} of its result"


def outcome_of(
    result: Any, count: int, *, out: str, wanted: dict[str, torch.Tensor] | None = None, seed: int = 0
) -> Outcome:
    """The leaves of a minibatch's result by instance, and the gradients of `wanted`: those of a weighted sum of all
    results with random weights, the same in each run and precision. The graph is kept for the user's backward."""
    if out == "list":
        results = [list(tree_flatten(one)[0]) for one in result]
    else:
        leaves = tree_flatten(result)[0]
        columns = [x.unbind(0) if isinstance(x, torch.Tensor) else [x] * count for x in leaves]
        results = (
            [list(row) for row in zip(*columns, strict=False)] if columns else [[] for _ in range(count)]
        )
    made = Outcome([[x.detach() if isinstance(x, torch.Tensor) else x for x in leaves] for leaves in results])
    if wanted:
        made.gradients = _gradients(results, wanted, seed)
    return made


def _gradients(results: list[list[Any]], wanted: dict[str, torch.Tensor], seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    losses, weights = [], []
    for t in (x for leaves in results for x in leaves if isinstance(x, torch.Tensor)):
        weight = torch.randn(
            t.shape, generator=generator, dtype=torch.float64, device="cpu"
        ).bfloat16()  # as every type has it
        if t.requires_grad:
            losses.append(t)
            weights.append(weight.to(t.device, t.dtype))
    if not losses:
        return dict.fromkeys(wanted)
    given = torch.autograd.grad(losses, list(wanted.values()), weights, retain_graph=True, allow_unused=True)
    return {name: None if g is None else g.detach() for name, g in zip(wanted, given, strict=True)}


# -- copies -----------------------------------------------------------------------------------------


@dataclass
class Material:
    """The inputs of a run: the module (or other owner), the arguments of each instance, and the tensors that get
    gradients, by name."""

    owner: Any
    instances: Sequence[Any]
    wanted: dict[str, torch.Tensor]

    @staticmethod
    def of(owner: Any, instances: Sequence[Any]) -> Material:
        """Gradients are wanted of parameters and of tensors that instances bring along, not of those with hooks,
        which would run once more."""
        wanted: dict[str, torch.Tensor] = {}
        if isinstance(owner, torch.nn.Module):
            wanted.update(owner.named_parameters())
        known = {id(t) for t in wanted.values()}
        inputs = [t for t in _tensors_in(instances) if id(t) not in known]
        wanted |= {f"input {k}": t for k, t in enumerate(t for t in inputs if t.requires_grad)}
        free = {n: t for n, t in wanted.items() if t.requires_grad and not t._backward_hooks}
        return Material(owner, instances, free)

    def copy(self, *, double: bool = False, seed: int = 0) -> Material:
        """Everything that module and instances reach, copied; what is shared stays shared. double: tensors of
        floating point in float64. seed: their numbers `nudged`. Raises what can't be copied raises."""
        memo: dict[int, Any] = {}
        for t in _tensors_in((self.owner, self.instances)):
            if t.layout is not torch.strided or is_lazy(t):
                continue
            other = (double or seed > 0) and (t.is_floating_point() or t.is_complex())
            if other or not t.is_leaf or t.untyped_storage().nbytes() > 2 * t.nbytes:
                # By itself deepcopy takes leaves only, and of a row of a table the whole table.
                memo[id(t)] = _copied(t, double=double and other, seed=seed)
        with _deep_recursion(), torch.inference_mode(False), torch.no_grad():
            owner, instances, wanted = copy.deepcopy((self.owner, self.instances, self.wanted), memo)
        return Material(owner, instances, wanted)


def _copied(t: torch.Tensor, *, double: bool, seed: int) -> torch.Tensor:
    """A copy as what it is a copy of: parameter or not, with its attributes."""
    with torch.inference_mode(False), torch.no_grad():
        copied = nudged(t.detach(), seed)
        copied = doubled(copied) if double else copied
        if isinstance(t, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, requires_grad=t.requires_grad)
        copied.requires_grad_(t.requires_grad)
        copied.__dict__.update(t.__dict__)
    return copied


_NO_CONTENTS = (
    type,
    FunctionType,
    BuiltinFunctionType,
    ModuleType,
    str,
    bytes,
    int,
    float,
    complex,
    np.ndarray,
)


def _tensors_in(root: Any) -> Iterator[torch.Tensor]:
    """The tensors that lists, dictionaries, attributes and bound methods lead to, each once."""
    seen: set[int] = set()
    rest = [root]
    while rest:
        x = rest.pop()
        if x is None or isinstance(x, _NO_CONTENTS) or id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, dict):
            rest += reversed(x.values())
        elif isinstance(x, (list, tuple)):
            rest += reversed(x)
        elif isinstance(x, (set, frozenset)):
            rest += list(x)
        elif isinstance(x, MethodType):
            rest.append(x.__self__)
        else:
            slots = [s for c in type(x).__mro__ for s in getattr(c, "__slots__", ())]
            rest += [getattr(x, s, None) for s in slots if not s.startswith("__")]
            own = getattr(x, "__dict__", {})
            rest += [v for name, v in reversed(own.items()) if not name.startswith("_fxbatch")]


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """deepcopy of a chain of thousands of objects: Python frames, which take no stack of C."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, 1_000_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@dataclass(frozen=True)
class RandomState:
    """Where the random numbers of torch, Python and numpy are."""

    of_cpu: torch.Tensor
    of_cuda: Sequence[torch.Tensor]
    of_python: Any
    of_numpy: Any

    @staticmethod
    def now() -> RandomState:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ()
        numpy = np.random.get_state()  # noqa: NPY002  # the one that users' code may draw from
        return RandomState(torch.get_rng_state(), cuda, random.getstate(), numpy)

    def restore(self) -> None:
        torch.set_rng_state(self.of_cpu)
        if self.of_cuda:
            torch.cuda.set_rng_state_all(list(self.of_cuda))
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)  # noqa: NPY002

    @staticmethod
    def seed(number: int) -> None:
        """Other random numbers from here on."""
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number % (1 << 32))  # noqa: NPY002  # it takes no more


# -- which operation ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """The first call that differs."""

    signature: str
    instance: int
    location: str
    message: str

    def __str__(self) -> str:
        line = f" ({self.location})" if self.location else ""
        return f"{self.signature}, instance {self.instance}{line}: {self.message}"


def first_difference(run: Run, prepared: Prepared) -> Place | None:
    """The first call, in recorded order, whose batched outputs differ from those of the call run alone, on what its
    inputs are alone. None where all calls agree, or where random operations forbid the comparison.

    run: a new one, of the engine that gave what differs.
    """
    if any(s.operation.random for program, _ in prepared for s in program.signatures):
        return None
    alone: list[torch.Tensor] = []
    exact: list[torch.Tensor] = []
    for program, schedule in prepared:
        # All values are results here: their rows are not used again by later steps.
        whole = dataclasses.replace(program, outputs=np.arange(program.values))
        run.execute(whole, schedule, last=len(prepared) == 1)
        with torch.no_grad(), kernel_modes():
            found = _walk(program, run, alone, exact)
        if found is not None:
            return found
    return None


def prepared_of(run: Run) -> Sequence[Prepared]:
    """What a run ran: of each of its segments, and of itself, the programs of its phases with their schedules."""
    return [[(p.program, p.schedule) for p in part.phases] for part in (*run.segments, run)]


def _signatures(parts: Sequence[Prepared]) -> list[Signature]:
    return [s for prepared in parts for program, _ in prepared for s in program.signatures]


def _walk(program: Program, run: Run, alone: list[torch.Tensor], exact: list[torch.Tensor]) -> Place | None:
    """The first call of this phase that differs; `alone` and `exact` grow by its values."""
    payload = {s: iter(p) for s, p in program.constants.items()}
    shared: dict[int, list[torch.Tensor]] = {}
    first, at, inputs = program.first_value.tolist(), program.input_offsets.tolist(), program.inputs.tolist()
    for c, s in enumerate(program.sig.tolist()):
        signature = program.signatures[s]
        if is_constant(signature):
            value = constant_tensor(signature, next(payload[s])).detach()
            alone.append(value)
            exact.append(doubled(value))
            continue
        operands = shared.setdefault(s, [o.resolve().detach() for o in signature.shared])
        reads = inputs[at[c] : at[c + 1]]
        with ExitStack() as modes:
            for device, dtype in signature.modes.autocast:
                modes.enter_context(torch.autocast(device, dtype=dtype))
            outputs = signature.run([alone[v] for v in reads], operands)
            try:
                precise = signature.run([exact[v] for v in reads], [doubled(t) for t in operands])
            except (RuntimeError, FxbatchError):
                precise = outputs  # an operation that fixes its precision
        alone.extend(outputs)
        exact.extend(precise)
        for j, (own, true) in enumerate(zip(outputs, precise, strict=True)):
            message = difference(run.read([first[c] + j])[0], own, true).message
            if message:
                instance = int(program.instance[c])
                return Place(str(signature), instance, signature.location, f"output {j}: {message}")
    return None


# -- one minibatch in N -------------------------------------------------------------------------------


@dataclass
class CheckedCall:
    """A call of a decorated callable that is compared with its loop."""

    engine: Engine
    forward: Callable[..., Any]  # for one instance
    name: str
    owner: Any
    instances: Sequence[Instance]
    run: Run
    batched: Callable[[], Any]  # the result, by that run
    undecorated: Callable[[Sequence[Instance]], Any]  # the loop, its results put together as the call's are


def checked(call: CheckedCall) -> Any:
    """The result of a call, compared with the loop on copies of module and instances.

    Raises DifferenceError, with the instance, the operation and the figures. Random numbers, globals and all else that
    instances share are the same for both, and go on afterwards as after the call alone. Where the two draw random
    numbers in another order, what depends on them is compared by shape and type only, with a CheckWarning, as is what
    the loop itself doesn't repeat.
    """
    material = Material.of(call.owner, call.instances)
    try:
        kept = material.copy()
    except Exception as error:  # whatever the user's own objects raise
        raise FxbatchError(
            f"check: module and instances of {call.name} can't be copied ({type(error).__name__}: {error}): give "
            "what can't be copied a __deepcopy__, or leave check out"
        ) from error
    forward = call.forward
    start, shared = RandomState.now(), SharedState.of(forward, call.owner)
    result = call.batched()
    after, left = RandomState.now(), SharedState.of(forward, call.owner)

    def begin() -> None:
        start.restore()
        shared.restore()

    try:
        _compare_with_loop(call, material, kept, result, prepared_of(call.run), begin)
    finally:
        after.restore()
        left.restore(anew=False)
    return result


def _compare_with_loop(
    call: CheckedCall,
    material: Material,
    kept: Material,
    result: Any,
    parts: Sequence[Prepared],
    begin: Callable[[], None],
) -> None:
    options = call.engine.options

    def outcome(of: Material, result: Any) -> Outcome:
        wanted = of.wanted if options.check_gradients and torch.is_grad_enabled() else None
        return outcome_of(result, len(call.instances), out=options.out, wanted=wanted)

    def run_loop(*, double: bool = False, nudge: int = 0, seed: int | None = None) -> Outcome:
        own = kept.copy(double=double, seed=nudge)
        begin()
        if seed is not None:
            RandomState.seed(seed)
        return outcome(own, call.undecorated(own.instances))

    def draw(seed: int) -> tuple[Outcome, Outcome | None]:
        return run_loop(nudge=seed), _float64(functools.partial(run_loop, nudge=seed))

    batched = outcome(material, result)
    try:
        loop = run_loop()
    except Exception as error:
        raise DifferenceError(
            f"check: the undecorated loop of {call.name} raises {type(error).__name__}: {error}; batched it does not"
        ) from error
    if not judge(batched, loop).differences:
        return
    exact = _float64(run_loop)
    coarsest = coarsest_of(_signatures(parts))
    found = judge(batched, loop, exact, draw, coarsest=coarsest).differences
    if not found:
        return
    repeated = judge(run_loop(), loop, exact, coarsest=coarsest).differences
    redrawn = judge(run_loop(seed=torch.initial_seed() ^ 1), loop, exact, coarsest=coarsest).differences
    differing = {k: d for k, d in found.items() if not (_excuses(repeated, k, d) or _excuses(redrawn, k, d))}
    if differing:
        raise _difference_error(call, differing, parts)
    why = "the loop gives something else when it runs again" if repeated else "they depend on random numbers"
    eval_too = "" if repeated else "; in eval() all are compared"
    what = f"{len(found)} results and gradients are compared by shape and type only"
    warn_once(call.engine, call.name, f"{what}: {why} ({name_of(next(iter(found)))}){eval_too}")


def _float64(run_loop: Callable[..., Outcome]) -> Outcome | None:
    """The referee; None where the model doesn't run in float64: then only rounding is allowed."""
    try:
        with double_by_default():
            return run_loop(double=True)
    except Exception:  # noqa: BLE001  # any: it is the user's code on types that it was not written for
        return None


def _excuses(varying: dict[Key, Judged], key: Key, found: Judged) -> bool:
    """Whether what differs is no more than what the loop does by itself: numbers, or types too."""
    return key in varying and (found.numbers or not varying[key].numbers)


def warn_once(engine: Engine, name: str, text: str) -> None:
    """A CheckWarning, once a model and text."""
    if text not in engine.warned:
        engine.warned.add(text)
        warnings.warn(f"check: {name}: {text}", CheckWarning, stacklevel=2)


def _difference_error(
    call: CheckedCall, differing: dict[Key, Judged], parts: Sequence[Prepared]
) -> DifferenceError:
    place, note = None, ""
    try:
        places = (first_difference(call.engine.execution(), prepared) for prepared in parts)
        place = next((x for x in places if x is not None), None)
    except (RuntimeError, FxbatchError) as error:
        note = f"which operation differs can't be told ({type(error).__name__}: {error})"
    first = next(iter(differing))
    instance = place.instance if place is not None else first[0] if isinstance(first, tuple) else None
    lines = [f"check: {call.name} gives other results than its undecorated loop"]
    lines += [f"  {name_of(key)}: {d.message}" for key, d in list(differing.items())[:SHOWN]]
    if len(differing) > SHOWN:
        lines.append(f"  ... {len(differing)} differences in all")
    if place is not None:
        note = f"first operation that differs: {place}"
    lines.append(note or "each operation, run again, agrees by itself" + _users(parts, first, call.owner))
    return DifferenceError("\n".join(lines), instance, "" if place is None else place.signature)


def _users(parts: Sequence[Prepared], first: Key, owner: Any) -> str:
    if not isinstance(owner, torch.nn.Module) or first not in dict(owner.named_parameters()):
        return ""
    assert isinstance(first, str)
    users = parameter_users(_signatures(parts), first, owner)
    return f"; {first} is read by {', '.join(users)}"


def parameter_users(signatures: Iterable[Signature], name: str, module: torch.nn.Module) -> Sequence[str]:
    """Signatures that read the parameter of that name, in order of first use."""
    path, _, own = name.rpartition(".")
    owner = module.get_submodule(path)
    parameter = getattr(owner, own)
    return list(
        dict.fromkeys(
            f"{s} ({s.location})"
            for s in signatures
            if any((o.owner is owner and o.name == own) or o.resolve() is parameter for o in s.shared)
        )
    )
