"""In-place writes, functionalised with the aliasing that eager tensors have.

In: calls that write to an input (`x += 1`, `x[0] = v`, `y.copy_(z)`). Out: recorded calls without
writes; every
Value whose content the write changes is rebound to its new content.

    row = x[0]        # a view of x
    row += 1          # records add, then a scatter for x; rebinds row and x
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fxbatch.errors import InPlaceError
from fxbatch.ir import Operation
from fxbatch.torch_private import storage_users, tree_flatten, tree_leaves, tree_unflatten
from fxbatch.trace.arguments import Arguments
from fxbatch.trace.constants import is_foreign
from fxbatch.trace.operations import FUNCTION, BodyRun, function_name
from fxbatch.trace.recorded_calls import RecordedCalls
from fxbatch.trace.table import Entry
from fxbatch.trace.user_line import at_line
from fxbatch.trace.values import RECORD, Value, Written, WrittenTensor, alias_of, stored_next

# Functions that give a view or a copy, depending on strides that a recording does not know.
_NEEDS_STRIDES = frozenset({"reshape", "reshape_as", "flatten", "ravel", "contiguous"})

# In-place functions whose name without the underscore is the same function out of place.
_PURE = (
    "add sub mul div pow neg abs exp log sqrt rsqrt reciprocal relu sigmoid tanh clamp clamp_min clamp_max masked_fill "
    "index_fill index_add index_copy scatter scatter_add addmm addcmul addcdiv lerp sin cos floor ceil round tril triu "
    "remainder fmod floor_divide true_divide subtract multiply divide masked_scatter"
)
_PURE_DUNDERS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
# The same, for functions that change the shape.
_RESHAPING = ("unsqueeze", "squeeze", "t", "transpose", "swapaxes", "swapdims")


def _pure_forms() -> dict[Any, Any]:
    forms: dict[Any, Any] = {}
    for name in (*_PURE.split(), *_RESHAPING):
        for where in (torch, torch.Tensor):
            written, pure = getattr(where, name + "_", None), getattr(torch.Tensor, name, None)
            if written is not None and pure is not None:
                forms[written] = pure
    for name in _PURE_DUNDERS:
        if hasattr(torch.Tensor, f"__i{name}__"):
            forms[getattr(torch.Tensor, f"__i{name}__")] = getattr(torch.Tensor, f"__{name}__")
    return forms


_PURE_FORMS = _pure_forms()


def on_copies(func: Callable[..., Any], places: tuple[int, ...], *args: Any, **kwargs: Any) -> list[Any]:
    """Call `func` on copies of the tensor leaves at `places`: their new contents, then its other results."""
    leaves, spec = tree_flatten((args, kwargs))
    for p in places:
        leaves[p] = leaves[p].clone()
    a, k = tree_unflatten(leaves, spec)
    copies = [leaves[p] for p in places]
    result = func(*a, **k)
    others = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    return copies + [x for x in others if not any(x is c for c in copies)]


def written_entry(made: Operation, arguments: Arguments, outcome: BodyRun, reason: str = "") -> Entry:
    """The signature, without writes, of a call that writes to its inputs; reason: why it is not to be batched."""
    pure = _PURE_FORMS.get(made.target)
    if pure is not None and outcome.written == (0,):
        operation = Operation(function_name(pure), "function", pure, FUNCTION)
        entry = _signed(operation, arguments, outcome, reason)
        allowed = function_name(pure) in _RESHAPING
        if entry is not None and (entry.signature.outputs == entry.signature.inputs[:1] or allowed):
            return entry
    if outcome.reshaped:
        raise InPlaceError(f"{made.name} changes the shape of a tensor in place{at_line()}")
    leaves, _ = tree_flatten((arguments.args, arguments.kwargs))
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    slots = [i for i, slot in zip(tensors, arguments.slots, strict=True) if slot.kind == "input"]
    places = tuple(slots[i] for i in outcome.written)
    operation = Operation(made.name, "function", on_copies, FUNCTION)
    entry = _signed(operation, arguments, outcome, reason, made.target, places)
    assert entry is not None
    return entry


def _signed(
    made: Operation, arguments: Arguments, written: BodyRun, reason: str, *before: Any
) -> Entry | None:
    template = arguments.template(*before)
    outcome = arguments.outcome(made.target, template)
    if outcome.written or outcome.written_shared:
        return None
    entry = arguments.recorder.signed(
        made, arguments.types(), arguments.shared, template, outcome, reason=reason
    )
    entry.written, entry.write = written.written, written
    return entry


def written_call(arguments: Arguments, entry: Entry) -> Any:
    """Record a call that writes to its inputs, and rebind them."""
    recorder, name = arguments.recorder, entry.signature.name
    targets = []
    for i in entry.written:
        leaf = arguments.leaves[i]
        if type(leaf) is not Value:
            if leaf._base is not None and entry.written == (0,) and stored_next():
                return recorder.row(entry, arguments.ids())[0]  # what follows writes it to where it was read
            leaf = becomes_value(recorder, leaf, arguments.values[i], name)
        targets.append(leaf)
    outputs = recorder.row(entry, arguments.ids())
    copies, rest = outputs[: len(targets)], outputs[len(targets) :]
    for target, new in zip(targets, copies, strict=True):
        rebind(recorder, target, new, name)
    return _result(entry, arguments, rest)


def _result(entry: Entry, arguments: Arguments, rest: list[Value]) -> Any:
    """What the eager call returns: written tensors are the user's own objects."""
    write = entry.write
    assert write is not None
    left = iter(rest)
    outputs = [arguments.leaves[i] if i >= 0 else next(left) for i in write.same]
    return write.result.fill(output=outputs)


def with_content(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The content of `new` with the gradient of `old`: what a tensor is after a write under `no_grad`."""
    written = old.clone()
    written.detach().copy_(new)
    return written


def _unseen_by_autograd(recorder: RecordedCalls, old: Value, new: Value) -> Value:
    """The new content of a Value as its later readers see it: what was written under `no_grad` keeps its gradient."""
    if recorder.known.grad or not recorder.graded or new._type != old._type:
        return new
    if not recorder.type_of(old).differentiable:
        return new
    with torch.enable_grad():
        kept: Value = recorder.call(with_content, (recorder.value(old._value, old._type), new), {})
    recorder.sync_modes()
    return kept


def rebind(recorder: RecordedCalls, v: Value, new: Value, name: str) -> None:
    """Give v, and whatever shares its memory, the new content."""
    alias = alias_of(v)
    path = [v]
    while alias is not None and alias.source is not None:
        path.append(alias.source)
        alias = alias_of(alias.source)
    root = path[-1]
    if id(root) in {id(kept) for kept, *_ in recorder.constants.values()}:
        raise InPlaceError(
            f"{name} writes through a view into a real tensor, which stays real: clone() it first{at_line()}"
        )
    if len(path) == 1 and (alias is None or not any(ref() is not None for ref in alias.views or ())):
        new = _unseen_by_autograd(recorder, v, new)
        recorder.rewritten.add(new._value)
        v._value, v._type = new._value, new._type
        return
    if new._type != v._type:
        raise InPlaceError(f"{name} changes the shape of a tensor that has views{at_line()}")
    contents = [new]
    for node, source in itertools.pairwise(path):
        contents.append(_scatter(recorder, source, node, contents[-1], name))
    for node, content in zip(path, contents, strict=True):
        node._value = _unseen_by_autograd(recorder, node, content)._value
        recorder.rewritten.add(node._value)
    _refresh(root, {id(p) for p in path}, name)


def _scatter(recorder: RecordedCalls, source: Value, view: Value, new: Value, name: str) -> Value:
    """The content of `source` after its view `view` was given the content `new`."""
    alias = alias_of(view)
    assert alias is not None
    if alias.call is None:
        raise InPlaceError(f"{name} writes to a view that a module made: clone() it first{at_line()}")
    func, args, kwargs = alias.call
    label = getattr(func, "__name__", "")
    if label in _NEEDS_STRIDES:
        raise InPlaceError(
            f"{name} writes to the result of {label}(), which is a view or a copy depending on strides: use "
            f"view() or clone(){at_line()}"
        )
    if not args or args[0] is not source:
        raise InPlaceError(
            f"{name} writes to a view made by {label}() in a way that can't be recorded{at_line()}"
        )
    return recorder.call(write_through, (source, new, func, alias.output, *args[1:]), kwargs)


def write_through(
    base: torch.Tensor, new: torch.Tensor, func: Any, output: int, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """`base` with its view `func(base, *args, **kwargs)` (leaf `output` of it) replaced by `new`."""
    copy = base.clone()
    view = tree_leaves(func(copy, *args, **kwargs))[output]
    view.copy_(new)
    return copy


def _refresh(source: Value, fresh: set[int], name: str) -> None:
    """Record all other views of a rewritten source anew, top down."""
    alias = alias_of(source)
    if alias is None or alias.views is None:
        return
    kept = []
    before = list(alias.views)
    for ref in before:
        view = ref()
        if view is None:
            continue
        kept.append(ref)
        below = alias_of(view)
        assert below is not None and below.source is not None
        if id(view) not in fresh:
            label = getattr(below.call[0], "__name__", "") if below.call is not None else ""
            if label in _NEEDS_STRIDES:
                raise InPlaceError(
                    f"{name} writes to a tensor of which {label}() gave a view or a copy, by its strides: "
                    f"use view() or clone(){at_line()}"
                )
            with torch.set_grad_enabled(below.grad):
                result = [x for x in tree_leaves(below.viewed_anew()) if type(x) is Value][below.output]
            view._value = result._value
        _refresh(view, fresh, name)
    alias.views[:] = kept


def becomes_value(recorder: RecordedCalls, t: torch.Tensor, value: Value, name: str) -> Value:
    """A real tensor that is about to be written to stands for a value from here on; `value` is its content until now.

    InPlaceError where something else shares its memory.
    """
    reason = _why_not(t)
    if not reason and t.is_leaf and t.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    if not reason:
        stand_in: torch.Tensor = torch.Tensor._make_wrapper_subclass(
            WrittenTensor, t.shape, strides=t.stride(), dtype=t.dtype, device=t.device
        )
        stand_in.__class__ = torch.Tensor
        try:
            torch.utils.swap_tensors(t, stand_in)
        except RuntimeError:
            reason = "a view of it, or the graph of its gradient, holds its memory"
    if reason:
        raise InPlaceError(
            f"{name} writes a value into a tensor {tuple(t.shape)} that has to stay as it is: {reason}. Write to a "
            f"clone() of it, or build the result with torch.stack or torch.cat{at_line()}"
        )
    before = stand_in  # the two have changed places
    t.__class__ = WrittenTensor
    _replace(recorder, t, before)
    found = Written(recorder, t, before, recorder.value(value._value, value._type), recorder.running)
    vars(t)[RECORD] = found
    recorder.written[id(t)] = found
    return found.value


def _why_not(t: torch.Tensor) -> str:
    """Why a tensor can't stand for a value; "" where it can."""
    if type(t) is not torch.Tensor or t.layout is not torch.strided or t.is_inference():
        return f"it is a {type(t).__name__} of its own kind"
    if is_foreign(t):
        return "numpy or another process shares its memory"
    if t._base is not None:
        return "it is a view of another tensor"
    if weakref.getweakrefcount(t):
        return "something refers to it weakly"
    if storage_users(t) > 1:
        return "another tensor shares its memory"
    return ""


def _replace(recorder: RecordedCalls, t: torch.Tensor, before: torch.Tensor) -> None:
    """What was recorded of the tensor until now is of what it was."""
    known = recorder.constants.pop(id(t), None)
    if known is None:
        return
    v, _, version = known
    kept = recorder.constants[id(before)] = v, before, version
    recorder.unchecked[:] = [kept if x is known else x for x in recorder.unchecked]
    entry = recorder.known.constant_entries[before.shape, before.dtype, before.device]
    for payload in (*recorder.phases.constants, recorder.payload):
        if entry.sid in payload:
            payload[entry.sid][:] = [before if x is t else x for x in payload[entry.sid]]
