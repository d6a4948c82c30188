"""PyTorch's operator database with a leading size that differs by instance: what is packed, and whether it is right.

In: the samples of torch's own tests. Out: for each operator one of "packed", "alone" (right, instance by instance),
"recorded" (no packed form: such calls run as any other), "wrong", or "no loop" (the sample itself does not run, as a
leaf that is resized: there is nothing to compare with).

    python -m tests.ragged.sized_operators            # prints the share of each
"""

from __future__ import annotations

import collections
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from fxbatch.ragged.packed_function import PackedFunction
from fxbatch.ragged.symbolic import NoPackedForm
from fxbatch.torch_private import tree_flatten, tree_leaves, tree_unflatten
from tests.ragged.against_loop import difference

SAMPLES = 6  # of an operator
RANDOM = (
    "dropout", "rand", "bernoulli", "multinomial", "normal", "uniform", "exponential", "cauchy", "geometric", "empty",
    "rrelu", "lowrank", "attention",
)  # fmt: skip


def outcome(op: Any, sample: Any) -> str:
    """What becomes of one sample, "" where it has no leading size to vary."""
    leaves, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    if any(t.layout is not torch.strided for t in tensors):
        return ""
    if not isinstance(sample.input, torch.Tensor) or sample.input.dim() == 0 or sample.input.shape[0] < 2:
        return ""
    size = sample.input.shape[0]
    own = tuple((0,) if t.dim() and t.shape[0] == size else () for t in tensors)

    def body(*given: torch.Tensor) -> list[torch.Tensor]:
        taken = iter(given)
        args, kwargs = tree_unflatten(
            [next(taken) if isinstance(x, torch.Tensor) else x for x in leaves], spec
        )
        found = [x for x in tree_leaves(op.op(*args, **kwargs)) if isinstance(x, torch.Tensor)]
        if not found:
            raise NoPackedForm("no tensor")
        return found

    instances, loop = [], []
    for length in (size, size - 1, 1, size):
        given = [_leaf(t[:length] if dims else t) for t, dims in zip(tensors, own, strict=True)]
        try:
            loop.append(body(*given))
        except NoPackedForm:
            return ""
        except Exception as error:  # noqa: BLE001 - an operator that does not take this size: not an instance
            if length == size:  # but its own sample's it takes
                return f"no loop: {type(error).__name__}: {str(error)[:150]}"
            continue
        instances.append(given)
    if len(instances) < 2:
        return ""
    try:
        function = PackedFunction.of(body, [_leaf(t) for t in instances[0]], own, [])
    except Exception:  # noqa: BLE001 - such calls are recorded
        return "recorded"
    columns = list(zip(*instances, strict=True))
    sizes = function.columns_of(columns)
    fits = function.graph.fitting(sizes)
    if fits.sum() < 2:
        return "recorded"
    chosen = fits.nonzero()[0].tolist()
    columns = [[c[i] for i in chosen] for c in columns]
    try:
        outputs, z = function(columns, [], [s[fits] for s in sizes], torch.device("cpu"))
        packed = function.apart(outputs, z)
    except Exception as error:  # noqa: BLE001 - it must not fail where the loop does not
        return f"wrong: {type(error).__name__}: {str(error)[:150]}"
    wrong = difference(packed, [instances[i] for i in chosen], lambda rows, _: [body(*row) for row in rows])
    if wrong:
        return f"wrong: {wrong}"
    return "alone" if function.lowered.alone else "packed"


def _leaf(t: torch.Tensor) -> torch.Tensor:
    differentiable = t.is_floating_point() or t.is_complex()
    return t.detach().clone().requires_grad_() if differentiable else t.clone()


def operators() -> list[Any]:
    """The database's operators that give the same twice."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if not any(word in op.name for word in RANDOM) and torch.float32 in op.dtypes]


def outcomes(op: Any) -> Iterator[str]:
    """Of the first samples of an operator."""
    found = 0
    try:
        samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=False))
    except Exception:  # noqa: BLE001 - samples that this build can't make
        return
    for sample in samples[:40]:
        if found >= SAMPLES:
            return
        made = outcome(op, sample)
        if made:
            found += 1
            yield made


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    counts: collections.Counter[str] = collections.Counter()
    for op in operators():
        if names and op.name not in names:
            continue
        found = list(outcomes(op))
        if not found:
            continue
        wrong = [x for x in found if x.startswith("wrong")]
        kinds = [x.partition(":")[0] for x in found]
        kind = min(kinds, key=["wrong", "recorded", "alone", "packed", "no loop"].index)
        counts[kind] += 1
        if kind in ("wrong", "alone") or "no loop" in kinds:
            print(
                f"{op.name}.{op.variant_test_name}".rstrip("."), wrong[:1] or sorted(set(found)), flush=True
            )
    print(dict(counts))


if __name__ == "__main__":
    main(sys.argv[1:])
