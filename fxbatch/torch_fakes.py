"""Fake tensors without torch._dynamo, which torch imports for them (1.5 s, with all that it imports in turn).

    put_dynamo_off()                   # torch._dynamo is imported when something of it is needed that isn't here
    with FakeMode() as mode:
        torch.empty(3).tanh()          # a FakeTensor: shape and dtype, no numbers
        mode.from_tensor(weight)       # the form of a real one
    stop_putting_off()

Private torch APIs, as in torch_private.py; checked against 2.11.0 and 2.13.0.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

__all__ = ["FakeMode", "before_dynamo", "import_for_fakes", "put_dynamo_off", "stop_putting_off"]

NAME, CONFIG = "torch._dynamo", "torch._dynamo.config"
_lock = threading.RLock()
_given: list[Any] = []  # functions that were told that they are disabled


def _imported() -> Any:
    return importlib.import_module(NAME)


# Calls what imports torch._dynamo; whoever has changed torch puts it back for so long.
before_dynamo: list[Callable[[Callable[[], Any]], Any]] = []


class _Config(ModuleType):
    """The settings that fake tensors ask for, as torch ships them."""

    fake_tensor_cache_enabled = True
    fake_tensor_cache_crosscheck_enabled = False
    _custom_ops_profile = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_load().config, name)


class _CompiledAutograd:
    """What torch.func's transforms switch off while they differentiate."""

    _disable = contextlib.nullcontext

    def __getattr__(self, name: str) -> Any:
        return getattr(_load().compiled_autograd, name)


class _Dynamo(ModuleType):
    """Stands for torch._dynamo while it is not imported: nothing was compiled then, so nothing is kept from it.

    Asked for anything else, it imports the real module, which is in its place from then on.
    """

    config = _Config(CONFIG)
    compiled_autograd = _CompiledAutograd()

    def disable(self, function: Any = None, recursive: bool = True, **options: Any) -> Any:
        """The function itself, where torch disables its own; see torch/_compile.py."""
        if options != {"wrapping": False}:
            return _load().disable(function, recursive, **options)
        _given.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        return getattr(_load(), name)


_STAND_IN = _Dynamo(NAME)


def put_dynamo_off() -> bool:
    """Put the stand-in in place, unless torch._dynamo is imported; whether it is in place."""
    with _lock:
        if NAME not in sys.modules:
            sys.modules[NAME], sys.modules[CONFIG] = _STAND_IN, _Dynamo.config
            torch._dynamo = _STAND_IN
        return sys.modules[NAME] is _STAND_IN


def stop_putting_off() -> None:
    """As if the stand-in had never been there."""
    with _lock:
        if sys.modules.get(NAME) is _STAND_IN:
            del sys.modules[NAME], sys.modules[CONFIG]
            torch.__dict__.pop("_dynamo", None)
        while _given:
            _given.pop().__dict__.pop("__dynamo_disable", None)


def _load() -> Any:
    """The real module."""
    if sys.modules.get(NAME, _STAND_IN) is not _STAND_IN:
        return _imported()

    def load() -> Any:
        stop_putting_off()
        return _imported()

    return before_dynamo[-1](load) if before_dynamo else load()


class _Converter(FakeTensorConverter):
    """Plain tensors become fake ones of their form; others, as sparse ones and subclasses, are torch's to convert."""

    def from_real_tensor(  # type: ignore[override]  # what else there is, is handed on
        self, fake_mode: FakeTensorMode, t: torch.Tensor, make_constant: bool = False, **kwargs: Any
    ) -> FakeTensor:
        if kwargs.get("shape_env") is not None or not _is_plain(t):
            return super().from_real_tensor(fake_mode, t, make_constant, **kwargs)
        known: FakeTensor | None = self._get_memo(t)
        if known is not None:
            return known
        with no_dispatch(), torch.inference_mode(False):
            form = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            made = FakeTensor(fake_mode, form, t.device, constant=t if make_constant else None)
        made.requires_grad_(t.requires_grad)
        if type(t) is torch.nn.Parameter:
            made._is_param = True  # what isinstance asks
        self.set_tensor_memo(t, made)
        if make_constant:
            self.add_constant_storage_mapping(made)
        return made


def _is_plain(t: torch.Tensor) -> bool:
    return (
        type(t) in (torch.Tensor, torch.nn.Parameter)
        and t.layout is torch.strided
        and t.is_leaf
        and not (t.is_quantized or t.is_nested or t.is_conj() or t.is_neg() or t.is_inference())
        and not torch._C._functorch.is_functorch_wrapped_tensor(t)
        and not torch._is_functional_tensor(t)
    )


class FakeMode(FakeTensorMode):
    """torch's mode, of fixed sizes."""

    def __init__(self, *, allow_non_fake_inputs: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=allow_non_fake_inputs)
        self.fake_tensor_converter = _Converter(copy_data=False, export=False)


@functools.cache
def import_for_fakes() -> None:
    """Have torch import what the first call on a fake tensor does (0.5 s; several times that under a profiler)."""
    with FakeMode(), torch.inference_mode(False):
        torch.empty(1, device="cpu").clone()
