"""What functions give that meet bare parameters and no value (`bare_parameters`): values, where they are recorded.

weight @ row      # the instance's own row: recorded
table[3]          # recorded as a look-up
weight.exp()      # the same for all instances: run as it is
"""

from __future__ import annotations

import types
from typing import Any

import torch

from fxbatch.torch_private import DisableTorchFunctionSubclass, inside_functorch, memory_is_real, tree_leaves
from fxbatch.trace.arguments import row_of_parameter
from fxbatch.trace.bare_parameters import BARE, VIEW_KEY, BareParameter, BareView
from fxbatch.trace.operations import named_functions
from fxbatch.trace.state import state
from fxbatch.trace.values import GETITEM, POSITIONS, Value

_NESTS = frozenset((tuple, list, dict))
_PLAIN = frozenset((int, bool, str, type(None), torch.dtype))
_TORCHS_OWN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
# What says something of a tensor, and computes nothing.
_TELLING = named_functions(
    "dim ndimension size stride storage_offset numel nelement element_size is_contiguous is_conj is_neg is_complex "
    "is_floating_point is_signed is_inference is_tensor data_ptr is_same_size untyped_storage storage get_device "
    "is_set_to dim_order _is_view is_pinned is_shared type item tolist numpy backward register_hook retain_grad "
    "__len__ __hash__ __repr__ __format__ __deepcopy__ __reduce_ex__ __bool__ __int__ __float__ __index__ __array__ "
    "__iter__ __contains__ equal allclose"
)
_OPERATORS = "add sub mul truediv floordiv mod pow and or xor lshift rshift"
_IN_PLACE = named_functions("__setitem__ " + " ".join(f"__i{x}__" for x in _OPERATORS.split()))
_OF_VALUES = Value.__dict__["__torch_function__"].__get__(None, Value)


def bare_function(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """`__torch_function__` of bare parameters and their views."""
    if Value in types:
        return _OF_VALUES(func, types, args, kwargs)
    return call_of_bare(func, args, kwargs or {})


for _kind in BARE:  # C's stands in its place where there is C (`torch_patches`)
    _kind.__torch_function__ = staticmethod(bare_function)  # type: ignore[method-assign]


def call_of_bare(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function of bare parameters, or views of them, gives: a value where it is recorded."""
    recorder = state.recorder
    if recorder is None or not recorder.heard.changed or inside_functorch() or not memory_is_real():
        return _plain(func, args, kwargs)
    recorder.sync_modes()
    key = None
    if func is GETITEM and len(args) == 2:
        args = args[0], _by_numbers(recorder, args[1])
    if args and type(args[0]) in BARE and not kwargs and all(map(_is_plain, args[1:])):
        key = func, id(args[0]), args[1:], tuple(map(type, args)), recorder.known.mode
        known = recorder.heard.again.get(key)
        if known is not None:
            return known
    with DisableTorchFunctionSubclass():
        recorded = _is_recorded(recorder, func, args, kwargs)
    if recorded:
        return recorder.call(func, args, kwargs)
    return _heard_views(recorder, key, func, args, kwargs)


def _is_plain(x: Any) -> bool:
    return type(x) in _PLAIN or (type(x) is tuple and all(type(i) is int for i in x))


def _by_numbers(recorder: Any, index: Any) -> Any:
    """An index of positions, of which some are the instance's own tensors, as numbers; others as they are."""
    if type(index) is int or not (recorder.watches_operands and recorder.can_read()):
        return index
    parts = index if type(index) is tuple else (index,)
    found = tuple([int(x) if _is_position(x) else x for x in parts])
    return index if any(type(x) is not int for x in found) else found if type(index) is tuple else found[0]


def _is_position(x: Any) -> bool:
    return type(x) is torch.Tensor and not x.dim() and x.dtype in POSITIONS


def _is_recorded(recorder: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function computes something of what is an instance's own: its tensors, and rows that it chose."""
    nested = kwargs or any(type(x) in _NESTS for x in args)
    if not any(_is_own(recorder, x) for x in (tree_leaves((args, kwargs)) if nested else args)):
        return False
    torchs_own = isinstance(func, _TORCHS_OWN) or (
        isinstance(func, types.FunctionType) and func.__module__.startswith("torch.")
    )
    told = func in _TELLING or getattr(func, "__name__", "") == "__get__"
    return torchs_own and not told and not _writes(func) and kwargs.get("out") is None


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (
        name in ("__set__", "__delete__")
        or func in _IN_PLACE
        or (name.endswith("_") and not name.endswith("__"))
    )


def _is_own(recorder: Any, x: Any) -> bool:
    if type(x) is torch.Tensor:
        return x.is_leaf and x.dtype is not torch.bool and recorder.owner_of(x) is None
    return type(x) is BareView and type(vars(x).get(VIEW_KEY)) is Value


def _heard_views(recorder: Any, key: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function's own result. Views of bare parameters in it are heard of too, and are the same objects whenever
    they are asked for again (key: as what), so that calls of them are recorded in C from the second on."""
    if _writes(func):
        recorder.heard.forget()
    result = _plain(func, args, kwargs)
    views = [x for x in (result if type(result) in _NESTS else (result,)) if type(x) is torch.Tensor]
    with DisableTorchFunctionSubclass():
        for x in views:
            if type(x._base) is BareParameter:
                row = row_of_parameter(recorder, x)
                vars(x)[VIEW_KEY] = _view_key(recorder, x) if row is None else row
    if any(VIEW_KEY not in vars(x) for x in views):
        recorder.heard.computed = True
    views = [x for x in views if VIEW_KEY in vars(x)]
    for x in views:
        x.__class__ = BareView
    recorder.heard.views += views
    if key is not None and views and result is views[0]:
        recorder.heard.again[key] = result
    return result


def _view_key(recorder: Any, x: torch.Tensor) -> object:
    geometry = tuple(x.shape), x.stride(), x.storage_offset(), x.is_conj(), x.is_neg()
    return recorder.table.view_key(x._base, (*geometry, x.grad_fn is not None))


def _plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)
