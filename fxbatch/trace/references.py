"""References to code and modules as plain data, for traces that are kept or sent between processes.

In: functions, modules of a model. Out: import paths and dotted names, and back.

    refer(torch.add)                 # Reference("torch", "add")
    Reference("torch", "add").resolve()
"""

from __future__ import annotations

import importlib
import pickle
from dataclasses import dataclass
from typing import Any

from fxbatch.errors import StaleTraceError, TraceError


@dataclass(frozen=True)
class Reference:
    """A function by import path; `pickled` for those that pickle knows how to find."""

    module: str
    name: str
    pickled: bytes = b""

    def resolve(self) -> Any:
        """The function, without the wrapper that @operation put around it."""
        if self.pickled:
            return pickle.loads(self.pickled)
        try:
            found: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise StaleTraceError(
                f"the trace calls {self.module}.{self.name}, which is gone: {error}"
            ) from None
        return _unwrapped(found)


def _unwrapped(func: Any) -> Any:
    return func.__wrapped__ if getattr(func, "__fxbatch_operation__", False) is True else func


def refer(func: Any) -> Reference:
    """The reference of a function; TraceError when there is none (a lambda, a local function)."""
    module, name = getattr(func, "__module__", None), getattr(func, "__qualname__", "")
    if module and name and "<" not in name:
        reference = Reference(module, name)
        try:
            if reference.resolve() is func:
                return reference
        except StaleTraceError:
            pass
    try:
        data = pickle.dumps(func)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TraceError(f"a trace can't be kept: {name or func!r} has no import path ({error})") from None
    return Reference("", name, data)
