"""One entry, judged: batched, one by one (why), refused (how), wrong or crashed.

In: an Entry. Out: a dict of plain data, a line of the table.

    judge(entries()["op: add"], samples=4)["verdict"]      # "batched"
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import fxbatch
from fxbatch.errors import FxbatchError
from fxbatch.judge import Draw, differences
from fxbatch.runtime.pool import Piece, Pool
from fxbatch.torch_private import tree_flatten, tree_map
from tests.conformance.databases import Call, Entry
from tests.oracle import draws_of, run, to_double

INSTANCES = 3
# From the best to the worst; an entry is as good as its worst right sample, or wrong.
VERDICTS = ("batched", "partly batched", "one by one", "no call", "refused", "slow", "crash", "wrong")


class Poisoned(Pool):
    """Memory full of nan, so that reading what nobody wrote shows in the results."""

    def take(self, device: torch.device, lines: int) -> Piece:
        taken = super().take(device, lines)
        taken.tensor.view(torch.int32).fill_(-1)  # nan in every floating type, -1 in others
        return taken


@fxbatch.operation
def carried(x: torch.Tensor) -> torch.Tensor:
    """A value with the contents of x: what an operation before this one would have made."""
    return x.clone()


def judge(
    entry: Entry, *, samples: int | None = None, seconds: float = 60.0, other: bool = True
) -> dict[str, Any]:
    """Run up to `samples` samples a dtype for up to `seconds`; `other`: of the other dtype too."""
    begin = time.monotonic()
    outcomes: list[dict[str, str]] = []
    left_out = 0
    second = entry.other_dtype() if other or torch.float32 not in entry.dtypes else None
    dtypes = [d for d in (torch.float32, second) if d is not None and d in entry.dtypes]
    for dtype in dtypes:
        sets = [entry.calls(dtype, seed) for seed in range(INSTANCES)]
        chosen = _spread(min(len(s) for s in sets), samples)
        for k in chosen:
            if time.monotonic() - begin > seconds:
                left_out += 1
                continue
            ragged = bool(k % 2)
            calls = [s[k] for s in sets]
            if ragged:  # another sample: other shapes, other arguments
                calls[-1] = sets[-1][k - 1]
            if entry.kind == "module":  # one module, its parameters shared
                if ragged and type(calls[-1].module) is type(calls[0].module):
                    calls[-1] = sets[-1][k]
                for call in calls:
                    call.function, call.module = calls[0].function, calls[0].module
            if not any(
                isinstance(x, torch.Tensor) for x in tree_flatten((calls[0].args, calls[0].kwargs))[0]
            ):
                continue
            try:
                outcome = judge_sample(
                    calls, gradients=entry.gradients, undefined=entry.undefined, every=not ragged
                )
            except Exception as error:  # noqa: BLE001 - a sample that the judge can't compare
                outcome = {"verdict": "crash", "why": f"the judge: {type(error).__name__}: {_first(error)}"}
            outcomes.append({"dtype": str(dtype).removeprefix("torch."), "sample": str(k), **outcome})
    return summary(entry, outcomes, left_out, time.monotonic() - begin)


def _spread(count: int, wanted: int | None) -> list[int]:
    if wanted is None or wanted >= count:
        return list(range(count))
    return sorted({round(i * (count - 1) / max(wanted - 1, 1)) for i in range(wanted)})


def summary(entry: Entry, outcomes: list[dict[str, str]], left_out: int, seconds: float) -> dict[str, Any]:
    """The line of the table."""
    counts = Counter(o["verdict"] for o in outcomes)
    bad = [o for o in outcomes if o["verdict"] in ("wrong", "crash")]
    reasons = Counter(o["why"] for o in outcomes if o["why"])
    if not outcomes:
        verdict = "no tensors"
    elif bad:
        verdict = max((o["verdict"] for o in bad), key=VERDICTS.index)
    elif len(counts) == 1:
        verdict = next(iter(counts))
    elif counts["batched"]:
        others = sum(n for v, n in counts.items() if v not in ("batched", "no call"))
        verdict = "partly batched" if others else "batched"
    else:
        verdict = max(counts, key=lambda v: counts[v])
    return {
        "entry": entry.name,
        "kind": entry.kind,
        "verdict": verdict,
        "counts": dict(sorted(counts.items())),
        "reasons": [reason for reason, _ in reasons.most_common(4)],
        "bad": [f"{o['dtype']} {o['sample']}: {o['why']}" for o in bad][:4],
        "left_out": left_out,
        "seconds": round(seconds, 1),
    }


def judge_sample(calls: Sequence[Call], *, gradients: bool, undefined: bool, every: bool) -> dict[str, str]:
    """One minibatch: `every` makes values of all tensors, else of the first only."""
    process = calls[0].process
    found = _judge(calls, gradients and process is None, undefined, every, None)
    if gradients and process is not None and found["verdict"] not in ("wrong", "crash", "refused"):
        again = _judge(calls, True, undefined, every, process)
        if again["verdict"] in ("wrong", "crash"):
            return again
    return found


def _root(calls: Sequence[Call], every: bool, process: Any) -> Any:
    functions = [c.function for c in calls]

    def call(self: Any, sample: Any) -> Any:
        args, kwargs, which = sample
        left = [True]

        def value(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or not (every or left[0]):
                return x
            left[0] = False
            return carried(x)

        args, kwargs = tree_map(value, (args, kwargs))
        function = self.part if isinstance(functions[0], torch.nn.Module) else functions[which]
        result = function(*args, **kwargs)
        return result if process is None else process(result)

    class Root(torch.nn.Module):
        forward = fxbatch.autobatch(out="list", adaptive=False)(call)

    root = Root()
    if isinstance(functions[0], torch.nn.Module):
        root.part = functions[0]
    Root.forward.__fxbatch__.engine(root).pool = Poisoned()
    return root


def _judge(
    calls: Sequence[Call], gradients: bool, undefined: bool, every: bool, process: Any
) -> dict[str, str]:
    root = _root(calls, every, process)
    instances = [[c.args, c.kwargs, i] for i, c in enumerate(calls)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with fxbatch.disabled():
                state = torch.get_rng_state()
                eager = run(root, [instances], gradients=gradients)
                torch.set_rng_state(state)
                torch.rand(1)
                again = run(root, [instances], gradients=gradients)
        except Exception as error:  # noqa: BLE001 - then the batched call has to raise too
            if gradients:
                return _judge(calls, False, undefined, every, process)
            return _raises_too(root, instances, error)
        random = not _same(eager, again)
        try:
            batched = run(root, [instances], gradients=gradients)
        except FxbatchError as error:
            return {"verdict": "refused", "why": f"{type(error).__name__}: {_first(error)}"}
        except Exception as error:  # noqa: BLE001 - the verdict
            return {"verdict": "crash", "why": f"{type(error).__name__}: {_first(error)}"}
        why = _differs(root, instances, batched, eager, gradients, types_only=random or undefined)
        if why and not (random or _draws(root)):
            return {"verdict": "wrong", "why": why}
        try:
            structure = _structure(root, instances)
        except FxbatchError as error:
            return {"verdict": "refused", "why": f"{type(error).__name__}: {_first(error)}"}
        if structure:
            return {"verdict": "wrong", "why": structure}
    return _how(root)


def _raises_too(root: Any, instances: Any, eager: Exception) -> dict[str, str]:
    try:
        root(instances)
    except Exception:  # noqa: BLE001 - as the loop does
        return {"verdict": "refused", "why": f"the loop raises too: {type(eager).__name__}"}
    return {"verdict": "wrong", "why": f"the loop raises {type(eager).__name__}: {_first(eager)}"}


def _structure(root: Any, instances: Any) -> str:
    """Where the results' pytrees, or what of them is no tensor, differ from the loop's."""
    with torch.no_grad():
        found = tree_flatten(root(instances))
        with fxbatch.disabled():
            wanted = tree_flatten(root(instances))
    if found[1] != wanted[1]:
        return f"structure {found[1]}, the loop gives {wanted[1]}"
    for a, b in zip(found[0], wanted[0], strict=True):
        if type(a) is not type(b) and not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            return f"gives a {type(a).__name__}, the loop a {type(b).__name__}"
        if not isinstance(a, torch.Tensor) and a != b and a == a:
            return f"gives {a!r}, the loop {b!r}"
    return ""


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    pairs = zip(a, b)
    return len(a) == len(b) and all(
        x is y or (x is not None and y is not None and x.shape == y.shape and torch.equal(_bits(x), _bits(y)))
        for x, y in pairs
    )


def _bits(x: torch.Tensor) -> torch.Tensor:
    x = x if x.layout is torch.strided else x.to_dense()
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    return torch.nan_to_num(x) if x.is_floating_point() else x


def _differs(
    root: Any, instances: Any, batched: Any, eager: Any, gradients: bool, *, types_only: bool
) -> str:
    if types_only:
        if len(batched) != len(eager):
            return f"{len(batched)} tensors, the loop gives {len(eager)}"
        for b, e in zip(batched, eager, strict=True):
            if (b is None) != (e is None) or (b is not None and (b.shape, b.dtype) != (e.shape, e.dtype)):
                return "types differ"
        return ""
    found = differences(batched, eager, _drawn(root, instances, eager, gradients))
    return "; ".join(f"tensor {i}: {judged.message}" for i, judged in found.items())


def _drawn(root: Any, instances: Any, eager: Any, gradients: bool) -> Iterator[Draw]:
    """The loop and its float64 run, on these instances and on such as differ a little; none where it can't run so."""
    memo: dict[int, Any] = {}
    try:
        with fxbatch.disabled():
            yield Draw(eager, run(to_double(root, memo), [to_double(instances, memo)], gradients=gradients))
        yield from draws_of(root, [instances], gradients=gradients)
    except Exception:  # noqa: BLE001 - then only rounding is allowed
        return


def _draws(root: Any) -> bool:
    """Whether an operation drew random numbers (an entry that sets the seed itself hides it from the loop)."""
    engine = type(root).forward.__fxbatch__.engine(root)
    return any(c.signature.operation.random for c in engine.operations._entries.values())


def _how(root: Any) -> dict[str, str]:
    """Whether the calls of the last run were batched, and if not, why."""
    engine = type(root).forward.__fxbatch__.engine(root)
    reasons = []
    batched = 0
    for compiled in engine.operations._entries.values():
        name = compiled.signature.operation.name
        if compiled.signature.operation.kind in ("constant", "number") or name == "carried":
            continue
        if compiled.reason:
            reasons.append(compiled.reason)
        else:
            batched += 1
    if reasons:
        return {"verdict": "one by one", "why": reasons[0][:160]}
    if batched:
        return {"verdict": "batched", "why": ""}
    return {"verdict": "no call", "why": ""}


def _first(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else "")[:200]
