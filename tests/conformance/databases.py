"""The entries of PyTorch's operator and module databases, as calls of plain functions.

In: the name of an entry, a dtype, a seed. Out: Calls. The only module of the tests that imports
`torch.testing._internal` (read against torch 2.11.0 and 2.13.0), where the entries are asked for: it takes seconds,
and most processes that find these tests run others.

    entry = entries()["op: add"]
    entry.calls(torch.float32, seed=0)[0]
"""

from __future__ import annotations

import functools
import random
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# Contents of the result are whatever lay in memory.
UNDEFINED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)


@dataclass
class Call:
    """One sample: `function(*args, **kwargs)`, and what of its result gradients are defined for."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any] | None = None
    module: torch.nn.Module | None = None


@dataclass
class Entry:
    """One entry of a database."""

    name: str  # "op: add", "module: nn.Linear", unique
    kind: str
    dtypes: tuple[torch.dtype, ...]
    gradients: bool
    undefined: bool  # the contents of its result are
    make: Callable[[torch.dtype, bool], list[Call]]

    def calls(self, dtype: torch.dtype, seed: int) -> list[Call]:
        """All samples, with other values for another seed."""
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the samples draw from it
        grad = self.gradients and (dtype.is_floating_point or dtype.is_complex)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.make(dtype, grad)

    def other_dtype(self) -> torch.dtype | None:
        """One integer, bool or complex dtype that is supported, by the name."""
        found = [d for d in (torch.int64, torch.bool, torch.complex64) if d in self.dtypes]
        return found[zlib.crc32(self.name.encode()) % len(found)] if found else None


def entries() -> dict[str, Entry]:
    """Every entry that takes tensors, by name, in the databases' order."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    found: dict[str, Entry] = {}
    for info in op_db:
        name = f"op: {info.name}" + (f".{info.variant_test_name}" if info.variant_test_name else "")
        entry = Entry(
            name,
            "op",
            tuple(sorted(info.supported_dtypes("cpu"), key=str)),
            bool(info.supports_autograd),
            info.name in UNDEFINED,
            functools.partial(_op_calls, info),
        )
        found.setdefault(name, entry)
    for info in module_db:
        for training in (False, True) if info.train_and_eval_differ else (False,):
            name = f"module: {info.name}" + (" (training)" if training else "")
            found[name] = Entry(
                name,
                "module",
                tuple(sorted(info.dtypes, key=str)),
                True,
                False,
                functools.partial(_module_calls, info, training),
            )
    return found


def _op_calls(info: Any, dtype: torch.dtype, grad: bool) -> list[Call]:
    calls = []
    for sample in info.sample_inputs("cpu", dtype, requires_grad=grad):
        process = sample.output_process_fn_grad
        marker = object()
        try:
            plain = process(marker) is marker
        except Exception:  # noqa: BLE001 - a process that takes tensors only is not the identity
            plain = False
        calls.append(
            Call(info.op, (sample.input, *sample.args), dict(sample.kwargs), None if plain else process)
        )
    return calls


def _module_calls(info: Any, training: bool, dtype: torch.dtype, grad: bool) -> list[Call]:
    calls = []
    made = info.module_inputs_func(info, "cpu", dtype, requires_grad=grad, training=training)
    for sample in made:
        build, call = sample.constructor_input, sample.forward_input
        if call is None:
            continue
        torch.manual_seed(len(calls))  # the module is the same whatever the seed of its inputs
        module = info.module_cls(*build.args, **build.kwargs).to(dtype)
        module.train(training)
        calls.append(Call(module, tuple(call.args), dict(call.kwargs), None, module))
    return calls
