"""Operations: the marker, the names, which Python numbers are lifted; and what a body gives and does.

In: torch functions, modules, what the user marks. Out: `ir.Operation`s with the rule that made them so.
A body runs once on fake tensors, to learn what it gives; torch's own functions on tensors of the device "meta".

    @operation
    def attend(query, keys):
        return torch.softmax(keys @ query, 0) @ keys
"""

from __future__ import annotations

import functools
import logging
import math
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import BuiltinFunctionType, FrameType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fxbatch.ir import Slot, Template, TensorSpec
from fxbatch.signature import tensor_spec
from fxbatch.stopwatch import building
from fxbatch.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    QuietDispatchMode,
    UnsupportedOperatorException,
    any_autocast,
    fake_mode,
    is_wrapped,
    outside_functorch,
    tree_flatten,
    tree_unflatten,
    without_saved_tensor_hooks,
)
from fxbatch.trace.one_sequence import RECURRENT, Layer, OneSequenceOfForm

TORCH_MODULE = "a torch.nn module (rule 1)"
PLAIN_MODULE = "a submodule called with tensors and plain scalars (rule 2)"
MARKED = "marked @fxbatch.operation (rule 3)"
FUNCTION = "a torch function on a recorded tensor (rule 4)"


def is_marked(module: torch.nn.Module) -> bool:
    """Whether this module or its class is marked @operation."""
    return getattr(module, "__fxbatch_operation__", False) is True


@dataclass(frozen=True)
class Attribute:
    """A tensor attribute as a function: `Attribute("T")(x)` is `x.T`; picklable."""

    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, x: torch.Tensor) -> Any:
        return getattr(x, self.name)


class CustomFunction:
    """A `torch.autograd.Function` as a plain function: `CustomFunction(cls)(x)` is `cls.apply(x)`.

    examined: what its code reads, of which there is one CustomFunction for each content; None: not looked at yet.
    """

    def __init__(self, cls: type[torch.autograd.Function], examined: object = None) -> None:
        self.cls = cls
        self.examined = examined
        self.__name__ = cls.__name__

    @property
    def has_context_apart(self) -> bool:
        """Whether its forward takes no ctx (it has setup_context), as torch's function transforms ask for."""
        return self.cls.setup_context is not torch.autograd.Function.setup_context

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.cls.apply(*args, **kwargs)

    def __reduce__(self) -> Any:
        return CustomFunction, (self.cls,)


def plain_function(func: object) -> object:
    """The function to call for what `__torch_function__` was given: getters become Attributes."""
    owner = getattr(func, "__self__", None)
    if owner is not None and getattr(func, "__name__", "") == "__get__" and hasattr(owner, "__name__"):
        return Attribute(owner.__name__)
    if isinstance(owner, property) and getattr(func, "__name__", "") == "__get__":
        assert owner.fget is not None
        return Attribute(owner.fget.__name__)
    return func


def function_name(func: object) -> str:
    """A short name: "add", "softmax", "T"."""
    name = getattr(func, "__name__", None) or type(func).__name__
    return name.strip("_") if name.startswith("__") else name


def take_row(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`x[index]` for an integer tensor of shape []: the lifted form of `h[node.index]`."""
    return x.index_select(0, index.reshape(1)).squeeze(0)


def _from_start(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """An index of rows of x, which may count from the end, counted from the start."""
    return torch.where(index < 0, index + x.shape[0], index)


def take_at(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`x[index]` for an integer tensor of shape [] that may count from the end."""
    return take_row(x, _from_start(x, index))


def put_at(x: torch.Tensor, index: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """`x` after `x[index] = row`, for an index as `take_at` takes it."""
    return x.index_copy(0, _from_start(x, index).reshape(1), row.unsqueeze(0))


def row_at(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`take_at` of a parameter: IndexError where it has no such row."""
    return F.embedding(_from_start(table, index), table)


def embedding_of_rows(
    index: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """`F.embedding` in a table of the instance's own: under vmap, an index out of range reads another's row."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        return F.embedding(index, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    rows = weight.index_select(0, index.reshape(-1)).reshape(*index.shape, weight.shape[-1])
    if padding_idx is None:
        return rows
    padding = padding_idx + weight.shape[0] if padding_idx < 0 else padding_idx
    return torch.where((index == padding).unsqueeze(-1), rows.detach(), rows)


def one_hot_within(index: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """`F.one_hot`, which under vmap gives zeros for a class out of range."""
    if num_classes < 1:
        return F.one_hot(index, num_classes)
    zeros = torch.zeros(*index.shape, num_classes, dtype=torch.int64, device=index.device)
    return zeros.scatter(-1, index.unsqueeze(-1), 1)


def where_by_bytes(condition: torch.Tensor, *others: object) -> torch.Tensor:
    """`torch.where` by a mask of uint8, which fake tensors refuse."""
    chosen: torch.Tensor = torch.where(condition.bool(), *others)  # type: ignore[assignment]
    return chosen


# Functions whose rules under vmap miss an index that is out of range, and what is recorded in their place.
WITHIN_RANGE: dict[object, Callable[..., torch.Tensor]] = {
    F.embedding: embedding_of_rows,
    F.one_hot: one_hot_within,
}


# argument leaf, size, stride, offset, conjugated, negated
View = tuple[int, tuple[int, ...], tuple[int, ...], int, bool, bool]


def on_views(func: Callable[..., object], views: tuple[View, ...], *args: object, **kwargs: object) -> object:
    """Call `func` with some tensor arguments seen through a view: `x @ weight.T` for `weight`."""
    leaves, spec = tree_flatten((args, kwargs))
    for leaf, size, stride, offset, conjugated, negated in views:
        base = leaves[leaf]
        if len(size) == 2 and (size, stride) == (base.shape[::-1], base.stride()[::-1]):
            view = base.t()
        else:
            view = base.as_strided(size, stride, offset)
        view = view.conj() if conjugated else view
        leaves[leaf] = view.neg() if negated else view
    args, kwargs = tree_unflatten(leaves, spec)
    return func(*args, **kwargs)


def named_functions(names: str) -> frozenset[object]:
    """The functions of torch, and the methods of tensors, that have these names."""
    places = (torch, torch.Tensor)
    return frozenset(getattr(where, n) for n in names.split() for where in places if hasattr(where, n))


# Functions of two arguments whose number may be a tensor of shape []; the same, for floating-point tensors only.
LIFTS = named_functions(
    "add sub rsub mul div true_divide floor_divide remainder fmod eq ne lt le gt ge greater less greater_equal "
    "less_equal not_equal subtract multiply divide __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ "
    "__rtruediv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __div__ "
    "__rdiv__"
)
LIFTS_FLOAT = named_functions("pow float_power __pow__ __rpow__")


def lifted_dtype(func: object, t: Any, number: object) -> torch.dtype | None:
    """The dtype of a lifted number beside a tensor of type t, None when it must stay static.

    Exact only: eager casts the number to the computation's dtype, so a [] tensor of that dtype is the same.
    """
    dtype = t.dtype
    floats = dtype in (torch.float32, torch.float64)
    if not (func in LIFTS and (floats or dtype is torch.int64)) and not (func in LIFTS_FLOAT and floats):
        return None
    if type(number) is int:
        return dtype if -(2**63) <= number < 2**63 else None
    if type(number) is float:
        return dtype if floats else torch.get_default_dtype()
    return None


# -- a body run once on fake tensors: what it gives, and what it does

# What a body raises on fake tensors when it needs values.
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


# What torch says of an argument that takes no gradients.
NOT_DIFFERENTIABLE = "is not differentiable with respect to argument"
_LOG = logging.getLogger(FakeTensorMode.__module__)


_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class BodyError(Exception):
    """The body can't be an operation; the message is the reason."""


class TooManyCallsError(BodyError):
    """A body whose parts batch better than it does."""


@dataclass(frozen=True)
class BodyRun:
    """Results, writes and reasons of one run of a body on fake tensors."""

    outputs: tuple[TensorSpec, ...]
    result: Template  # output slots where the tensors are
    gradients: tuple[bool, ...]  # per output: whether it would carry a gradient to differentiable inputs
    aliases: tuple[int, ...]  # per output: the input whose memory it shares, -1 for none
    same: tuple[int, ...]  # per output: the input that it is, -1 for none
    written: tuple[int, ...] = ()  # inputs that the body writes to
    reshaped: bool = False  # the body changes the shape of an input
    written_shared: tuple[int, ...] = ()  # shared operands that the body writes to
    random: bool = False  # draws torch random numbers
    calls: int = field(default=0, compare=False)  # of torch's functions

    def detaches(self, inputs: Sequence[TensorSpec]) -> bool:
        """Whether gradients could go through by the types, and don't."""
        through = any(t.differentiable for t in inputs) and any(t.differentiable for t in self.outputs)
        return through and not any(self.gradients)


class _RandomWatch(QuietDispatchMode):
    """Sees whether an operation draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.random = False

    def __torch_dispatch__(
        self, func: object, types: object, args: object = (), kwargs: object = None
    ) -> object:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.random = True
        return self.call(func, args, kwargs)


# What a tensor is besides its type and content: the fakes here don't say it as the real ones will.
_OF_MEMORY = named_functions(
    "stride storage_offset is_contiguous dim_order data_ptr const_data_ptr as_strided as_strided_ as_strided_copy "
    "as_strided_scatter storage untyped_storage set_ is_set_to is_shared is_pinned is_conj is_neg is_inference _is_view"
) | {getattr(torch.Tensor, name).__get__ for name in ("_version", "_base", "_cdata", "output_nr")}


def _has_steps(x: Any, *rest: Any) -> bool:
    """Whether a recurrent layer is given several steps; the fourth argument of a packed sequence is its weights."""
    return len(rest) == 8 and type(rest[2]) is bool and x.dim() == 3 and x.shape[rest[-1]] > 1


def _by_one_step(layer: Layer, x: torch.Tensor, *rest: Any) -> Sequence[torch.Tensor]:
    """A recurrent layer's result, of which all steps are like one: on fakes torch runs them one by one, in Python."""
    along = int(rest[-1])  # batch_first
    first, *states = layer(x.narrow(along, 0, 1), *rest)
    shape = [*first.shape[:along], x.shape[along], *first.shape[along + 1 :]]
    return (first.expand(shape).clone(), *states)


class _ByOneStep(OneSequenceOfForm):
    def layer(self, func: object) -> Layer:
        return functools.partial(_by_one_step, super().layer(func))


MOST_USES = 16  # of one weight in a forward that is packed


def _asked_by_torch(frame: FrameType) -> bool:
    """Whether torch's own code runs in a frame."""
    return str(frame.f_globals.get("__name__", "")).split(".")[0] == "torch"


_META = torch.device("meta")
with _META:  # torch looks its factories up once: not while others stand for them here
    torch.empty(0)
# What a tensor on "meta" says of its device, in place of the real one's.
_OF_DEVICE: dict[object, Callable[[torch.device], object]] = {
    torch.Tensor.device.__get__: lambda device: device,
    torch.Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
    torch.Tensor.is_meta.__get__: lambda _: False,  # type: ignore[attr-defined]
    torch.Tensor.get_device: lambda device: -1 if device.index is None else device.index,
}


def data_of_tensors() -> tuple[object, ...]:
    """What `x.data` is to `__torch_function__`: torch's, and what stands for it while a recording runs."""
    return tuple(vars(kind)["data"].__get__ for kind in torch.Tensor.__mro__ if "data" in vars(kind))


class _CallWatch(TorchFunctionMode):
    """Refuses what the user's code asks about a tensor's memory (torch's own code only chooses a faster way by it),
    more than `most` calls of torch, and more than MOST_USES calls of a function with one of `weights`.

    device: of the user, where tensors are on "meta": it is named in the place of that, and "meta" where it is named."""

    def __init__(
        self, most: int | None, weights: Sequence[torch.Tensor], device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.device = device
        self.one = _ByOneStep()
        self.data = data_of_tensors()
        self.calls = 0
        self.most = math.inf if most is None else most
        self.weights = {id(w) for w in weights if w.dim() > 1}
        self.uses: dict[tuple[object, int], int] = {}

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        self.calls += 1
        if self.calls > self.most:
            raise TooManyCallsError(f"calls torch more than {self.most} times: its parts batch better")
        for key in [(func, id(x)) for x in args if id(x) in self.weights]:
            self.uses[key] = self.uses.get(key, 0) + 1
            if self.uses[key] > MOST_USES:
                name = function_name(func)
                raise TooManyCallsError(f"loops over {name}: the steps of all instances batch better")
        if func in self.data:  # what is written to it is noticed then
            return args[0].detach()
        if func in RECURRENT and _has_steps(*args):
            return _by_one_step(func, *args)
        if func in self.one.calls and (result := self.one.of(func, args, kwargs or {})) is not None:
            return result
        if self.device is not None:
            if any_autocast():  # of the body's own, which casts tensors of its device alone
                raise BodyError("switches autocast on")
            if any(map(_has_memory, args)) or (kwargs and any(map(_has_memory, kwargs.values()))):
                raise BodyError("uses a tensor that is none of its operands")
            if func in _OF_DEVICE and not _asked_by_torch(sys._getframe(1)):
                return _OF_DEVICE[func](self.device)
            args = tuple(_META if isinstance(x, torch.device) and x == self.device else x for x in args)
            if kwargs and kwargs.get("device") is not None and torch.device(kwargs["device"]) == self.device:
                kwargs = {**kwargs, "device": _META}
            if func in _OTHER_ON_META and func not in _OF_MEMORY:
                raise BodyError("calls what is other on tensors without memory")
        if func in _OF_MEMORY:
            asking = sys._getframe(1)
            if not _asked_by_torch(asking) and asking.f_code is not on_views.__code__:
                name = getattr(getattr(func, "__self__", None), "__name__", func.__name__)
                raise BodyError(
                    f"{name} asks for the memory of a tensor, which batched tensors don't have one by one; clone(), "
                    "reshape() and contiguous() need not know it"
                )
        return func(*args, **(kwargs or {}))


class WithoutMemory(TorchFunctionMode):
    """Refuses calls that may be others on tensors without memory: they name a device, or ask for one, or are under an
    autocast of the body's own."""

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: object = None
    ) -> object:
        asks = func in _OF_DEVICE and not _asked_by_torch(sys._getframe(1))
        by_name = kwargs if isinstance(kwargs, dict) else {}
        named = any(isinstance(x, torch.device) or _has_memory(x) for x in (*args, *by_name.values()))
        if asks or named or by_name.get("device") is not None or func in _OTHER_ON_META or any_autocast():
            raise BodyError("calls what is other on tensors without memory")
        return func(*args, **by_name)


def _has_memory(x: Any) -> bool:
    """Whether an argument is a tensor, or some, that are not on "meta": some functions take such beside others."""
    if isinstance(x, torch.Tensor):
        return not x.is_meta
    return type(x) in (list, tuple) and any(map(_has_memory, x))


OfOperands = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], object]  # inputs, and shared ones


def run_on_fakes(
    body: OfOperands,
    inputs: Sequence[TensorSpec],
    shared: Sequence[torch.Tensor],
    *,
    grad: bool = True,
    most: int | None = None,
    plain: bool = False,
    loops: bool = True,
) -> BodyRun:
    """Run `body(inputs, shared)` on fake tensors under the modes that are on.

    plain: it is torch's own code, or plain code of users: where all are on one device and none asks for that, tensors
    without memory say as much in a tenth of the time. Raises what the body raises; BodyError when it draws Python or
    numpy random numbers or returns objects, calls torch more than `most` times, or, without `loops`, one function with
    the same weight again and again.
    """
    with building(), without_saved_tensor_hooks(), outside_functorch():
        if plain:
            outcome = _run_without_memory(body, inputs, shared, grad=grad, most=most, loops=loops)
            if outcome is not None:
                return outcome
        run = functools.partial(_run_on_fakes, body, inputs, shared, grad=grad, most=most, loops=loops)
        try:
            return run(differentiable=True)
        except RuntimeError as error:
            if NOT_DIFFERENTIABLE not in str(error):
                raise
        # An argument that takes no gradients (`running_mean`): whether this one needs one is not known here.
        outcome = run(differentiable=False)
        return replace(outcome, gradients=tuple(t.differentiable for t in outcome.outputs))


def is_torchs_own(func: object) -> bool:
    """Whether a function is torch's, or one that stands for some of them here; not one that asks for memory."""
    ours = isinstance(func, FunctionType) and func.__module__.startswith(("torch.", "fxbatch."))
    return (ours or isinstance(func, IN_C)) and func not in _OTHER_ON_META


# What says something else of tensors without memory.
_OTHER_ON_META = (
    _OF_MEMORY | named_functions("native_batch_norm _native_batch_norm_legit ctc_loss") | {F.ctc_loss}
)
IN_C = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)


def _run_without_memory(
    body: OfOperands,
    inputs: Sequence[TensorSpec],
    shared: Sequence[torch.Tensor],
    *,
    grad: bool,
    most: int | None = None,
    loops: bool = True,
) -> BodyRun | None:
    """The BodyRun of torch's own code, or plain code, on tensors of the device "meta"; None where it does not run on
    these, or they could say something else than tensors of the real device."""
    devices = {t.device for t in inputs} | {t.device for t in shared}
    dense = all(t.layout is torch.strided and not is_wrapped(t) for t in shared)
    if len(devices) != 1 or any_autocast() or not dense:
        return None
    (device,) = devices
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        types = [tensor_spec(t.shape, t.dtype, _META) for t in inputs]
        tensors = [_empty(t) for t in types]
        operands = [
            torch.empty_strided(
                t.shape, t.stride(), dtype=t.dtype, device=_META, requires_grad=t.requires_grad
            )
            for t in shared
        ]
        try:
            with _META if device == torch.get_default_device() else nullcontext():
                calls = _CallWatch(most, () if loops else operands, device)
                outcome = _run_watched(body, types, tensors, operands, calls)
        except TooManyCallsError:
            raise
        except Exception:  # noqa: BLE001 - fake tensors say what is wrong, if anything is
            return None
        plain = all(x is None or type(x) is Slot for x in outcome.result.leaves)  # a write gives none
        if not plain or any(t.device.type != "meta" for t in outcome.outputs):
            return None
        return replace(outcome, outputs=tuple(tensor_spec(t.shape, t.dtype, device) for t in outcome.outputs))


def _run_on_fakes(
    body: OfOperands,
    inputs: Sequence[TensorSpec],
    shared: Sequence[torch.Tensor],
    *,
    grad: bool,
    differentiable: bool,
    most: int | None,
    loops: bool,
) -> BodyRun:
    with torch.inference_mode(False), fake_mode() as mode, torch.set_grad_enabled(grad):
        fakes = [_empty(t, differentiable=differentiable) for t in inputs]
        fake_shared = [_fake_shared(mode, s) for s in shared]
        states = random.getstate(), np.random.get_state()  # noqa: NPY002 - users draw from it
        quiet, _LOG.disabled = _LOG.disabled, True  # what fails here fails again for the user, or is handled
        try:
            calls = _CallWatch(most, () if loops else fake_shared)
            outcome = _run_watched(body, inputs, fakes, fake_shared, calls)
        finally:
            _LOG.disabled = quiet
            drew = _restore_python_random(states)
        if drew:
            raise BodyError("draws Python or numpy random numbers")
        return outcome


def _empty(t: TensorSpec, *, differentiable: bool = True) -> torch.Tensor:
    grad = differentiable and t.differentiable
    return torch.empty(t.shape, dtype=t.dtype, device=t.device, requires_grad=grad).clone()


def _fake_shared(mode: FakeTensorMode, s: torch.Tensor) -> torch.Tensor:
    if not is_wrapped(s):
        fake: torch.Tensor = mode.from_tensor(s)
        return fake
    return torch.empty(s.shape, dtype=s.dtype, device=s.device, requires_grad=s.requires_grad)


def _run_watched(
    body: OfOperands,
    types: Sequence[TensorSpec],
    fakes: list[torch.Tensor],
    fake_shared: list[torch.Tensor],
    calls: _CallWatch,
) -> BodyRun:
    """Run a body on these tensors, of these types; what it gives, and what it has written to."""
    before, shared_before = [t._version for t in fakes], [t._version for t in fake_shared]
    with _RandomWatch() as watch, calls:
        leaves, spec = tree_flatten(body(list(fakes), list(fake_shared)))
    storages = {f.untyped_storage()._cdata: i for i, f in reversed(list(enumerate(fakes)))}
    outputs: list[TensorSpec] = []
    aliases: list[int] = []
    same: list[int] = []
    gradients: list[bool] = []
    slots: list[object] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is not torch.strided:
                raise BodyError(f"gives a {leaf.layout} tensor")
            slots.append(Slot("output", len(outputs)))
            outputs.append(TensorSpec.of(leaf))
            aliases.append(storages.get(leaf.untyped_storage()._cdata, -1))
            same.append(next((i for i, f in enumerate(fakes) if f is leaf), -1))
            gradients.append(leaf.requires_grad)
        elif leaf is None or isinstance(leaf, _PLAIN):
            slots.append(leaf)
        else:
            raise BodyError(f"returns a {type(leaf).__name__}")
    reshaped = [i for i, f in enumerate(fakes) if TensorSpec.of(f) != types[i]]
    return BodyRun(
        outputs=tuple(outputs),
        result=Template(tuple(slots), spec),
        aliases=tuple(aliases),
        same=tuple(same),
        written=tuple(i for i, f in enumerate(fakes) if f._version != before[i] or i in reshaped),
        reshaped=bool(reshaped),
        written_shared=tuple(i for i, f in enumerate(fake_shared) if f._version != shared_before[i]),
        random=watch.random,
        gradients=tuple(gradients),
        calls=calls.calls,
    )


def _restore_python_random(states: tuple[Any, Any]) -> bool:
    """Put Python's and numpy's generators back; whether either had moved."""
    moved = random.getstate() != states[0]
    pairs = zip(np.random.get_state(), states[1], strict=True)  # noqa: NPY002 - users draw from it
    moved |= not all(np.array_equal(now, before) for now, before in pairs)
    if moved:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002 - users draw from it
    return moved
