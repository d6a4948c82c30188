"""In-place writes, functionalised with the aliasing that eager tensors have.

In: calls that write to an input (`x += 1`, `x[0] = v`, `y.copy_(z)`). Out: recorded calls without writes. The Value
whose memory is written to gets another number; what it is a view of is recorded with the new part in it; its own views,
and others of the same memory, are recorded anew when they are next used (`values.refresh`).

    row = x[0]        # a view of x
    row += 1          # records an addition, then x with another row; both are the same objects
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxbatch.errors import InPlaceError
from fxbatch.ir import Operation
from fxbatch.torch_private import storage_users, tree_flatten, tree_leaves, tree_unflatten
from fxbatch.trace.arguments import Arguments
from fxbatch.trace.operations import FUNCTION, BodyRun, function_name, put_at, take_at
from fxbatch.trace.recorded_calls import RecordedCalls
from fxbatch.trace.table import GIVES_NONE, GIVES_TARGET, WRITES_OTHERWISE, Entry
from fxbatch.trace.user_line import at_line
from fxbatch.trace.values import (
    CONSTANT,
    COPIED_ROW,
    GETITEM,
    NEEDS_STRIDES,
    RECORD,
    REQUIRES_GRAD,
    Places,
    Value,
    Written,
    WrittenTensor,
    depth_of,
    is_stale,
    new_value,
    place_in,
    place_within,
    recorded_with,
    refresh,
    row_number,
    value_of,
    view_of,
)

# In-place functions whose name without the underscore is the same function out of place.
_PURE = (
    "add sub mul div pow neg abs exp log sqrt rsqrt reciprocal relu sigmoid tanh clamp clamp_min clamp_max masked_fill "
    "index_fill index_add index_copy scatter scatter_add addmm addcmul addcdiv lerp sin cos floor ceil round tril triu "
    "remainder fmod floor_divide true_divide subtract multiply divide masked_scatter"
)
_PURE_DUNDERS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
# The same, for functions that change the shape.
_RESHAPING = ("unsqueeze", "squeeze", "t", "transpose", "swapaxes", "swapdims")


def copied(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """The tensor that x is after `x.copy_(source)`."""
    return source.to(x.dtype).expand(x.shape).clone()


def zeroed(x: torch.Tensor) -> torch.Tensor:
    """The tensor that x is after `x.zero_()`."""
    return torch.zeros_like(x)


def _forms(names: tuple[str, ...]) -> dict[object, object]:
    """Functions that write to their first argument, by the same functions that don't."""
    named = ((name, getattr(where, f"{name}_", None)) for name in names for where in (torch, torch.Tensor))
    return {
        f: getattr(torch.Tensor, name) for name, f in named if f is not None and hasattr(torch.Tensor, name)
    }


MANY_FILLED = 256  # calls of factories that are told apart
OFTEN = 8  # tensors of one call of a factory in a recording that are used as they were made, as zeros at each leaf
_EMPTY = torch.empty

# Views of all elements in the same order.
_SAME_ORDER = ("view", "view_as", "squeeze", "unsqueeze", "flatten")

# What gives the new content of the first argument; it has the same type, or the call is no write of this kind.
PURE_FORMS: dict[object, object] = {
    **_forms(tuple(_PURE.split())),
    **{
        getattr(torch.Tensor, f"__i{name}__"): getattr(torch.Tensor, f"__{name}__")
        for name in _PURE_DUNDERS
        if hasattr(torch.Tensor, f"__i{name}__")
    },
    torch.Tensor.fill_: torch.fill,
    torch.Tensor.zero_: zeroed,
    torch.zero_: zeroed,
    torch.Tensor.copy_: copied,
}
_RESHAPING_FORMS = _forms(_RESHAPING)
# Views through which no gradient goes: what is written through them, autograd does not see.
_DETACHING = frozenset({"detach", "data", "detach_"})


def on_copies(
    func: Callable[..., object], places: tuple[int, ...], *args: object, **kwargs: object
) -> list[object]:
    """Call `func` on copies of the tensor leaves at `places`: their new contents, then its other results."""
    leaves, spec = tree_flatten((args, kwargs))
    for p in places:
        leaves[p] = leaves[p].clone()
    a, k = tree_unflatten(leaves, spec)
    copies = [leaves[p] for p in places]
    result = func(*a, **k)
    others = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
    return copies + [x for x in others if not any(x is c for c in copies)]


def written_entry(called: Operation, arguments: Arguments, outcome: BodyRun, reason: str = "") -> Entry:
    """The signature, without writes, of a call that writes to its inputs; reason: why it is not to be batched."""
    pure = _RESHAPING_FORMS.get(called.target)
    if pure is not None and outcome.written == (0,):
        operation = Operation(function_name(pure), "function", pure, FUNCTION)
        entry = _signed(operation, arguments, outcome, reason)
        if entry is not None:
            return entry
    if outcome.reshaped:
        raise InPlaceError(f"{called.name} changes the shape of a tensor in place{at_line()}")
    leaves, _ = tree_flatten((arguments.args, arguments.kwargs))
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    slots = [i for i, slot in zip(tensors, arguments.slots, strict=True) if slot.kind == "input"]
    places = tuple(slots[i] for i in outcome.written)
    operation = Operation(called.name, "function", on_copies, FUNCTION)
    entry = _signed(operation, arguments, outcome, reason, called.target, places)
    assert entry is not None
    return entry


def _signed(
    called: Operation, arguments: Arguments, written: BodyRun, reason: str, *before: object
) -> Entry | None:
    template = arguments.template(*before)
    outcome = arguments.outcome(called.target, template)
    if outcome.written or outcome.written_shared:
        return None
    signed = arguments.recorder.signed
    entry = signed(called, arguments.types(), arguments.shared, template, outcome, reason=reason)
    entry.written, entry.write = written.written, written
    alone = written.written == (0,) and len(entry.types) == 1 and arguments.leaves[0] is arguments.args[0]
    entry.written_as = WRITES_OTHERWISE
    if alone and written.same == (0,) and written.result.spec.is_leaf():
        entry.written_as = GIVES_TARGET
    elif alone and not written.same and written.result.leaves == (None,):
        entry.written_as = GIVES_NONE
    return entry


def call_pure(
    recorder: RecordedCalls, func: object, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """A call of a function that has a pure form; None where it is no write of a value to a tensor of its type."""
    target = args[0] if args else None
    if not isinstance(target, torch.Tensor) or (type(target) is not Value and _is_shared(recorder, target)):
        return None
    content = recorder.call(PURE_FORMS[func], args, kwargs)
    if type(content) is not Value:
        return None
    if type(target) is not Value:
        return target if write_first(recorder, target, content, func) else None
    if target._type != content._type:
        return None
    rebind(recorder, target, content, function_name(func))
    return target


def write_first(recorder: RecordedCalls, t: torch.Tensor, content: Value, func: object) -> bool:
    """Give a real tensor this content: it stands for a value from here on. False where nothing may be written to it, or
    this is of another type."""
    v = None if _is_shared(recorder, t) else recorder.constant(t)
    if v is None or v._type != content._type:
        return False
    rebind(recorder, becomes_value(recorder, t, v, function_name(func)), content, function_name(func))
    return True


def counted(write: Callable[..., bool]) -> Callable[..., bool]:
    """`write` for C to call, as one of the calls that Python records."""

    def counted_write(recorder: RecordedCalls, *args: object) -> bool:
        recorder.long_calls += 1
        return write(recorder, *args)

    return counted_write


def detach_in_place(recorder: RecordedCalls, v: Value) -> Value:
    """`v.detach_()`: from here on no gradient goes through it."""
    if view_of(v) is not None:
        raise RuntimeError("Can't detach views in-place. Use detach() instead.")
    content = recorder.call(torch.Tensor.detach, (v,), {})
    v._value, v._flags = content._value, content._flags
    return v


def _is_shared(recorder: RecordedCalls, t: torch.Tensor) -> bool:
    return recorder.shared_operand(t) is not None or (
        t._base is not None and recorder.shared_operand(t._base) is not None
    )


def written_call(arguments: Arguments, entry: Entry) -> object:
    """Record a call that writes to its inputs, and rebind them."""
    recorder, name = arguments.recorder, entry.signature.name
    targets = []
    for i in entry.written:
        leaf = arguments.leaves[i]
        if type(leaf) is not Value:
            leaf = becomes_value(recorder, leaf, arguments.values[i], name)
        targets.append(leaf)
    outputs = recorder.row(entry, arguments.values)
    copies, rest = outputs[: len(targets)], outputs[len(targets) :]
    for target, new in zip(targets, copies, strict=True):
        rebind(recorder, target, new, name)
    write, left = entry.write, iter(rest)
    assert write is not None
    results = [
        arguments.leaves[i] if i >= 0 else next(left) for i in write.same
    ]  # the user's objects are given back
    return write.result.fill(output=results)


def with_content(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The content of `new` with the gradient of `old`: what a tensor is after a write under `no_grad`."""
    written = old.clone()
    written.detach().copy_(new)
    return written


def _with_gradient_of(recorder: RecordedCalls, old: Value, new: Value) -> Value:
    """The content of `new` with the gradient of `old`."""
    if new._type != old._type or not recorder.type_of(old).differentiable:
        return new
    with recorded_with(recorder, grad=True):
        before = new_value(recorder, old._value, old._type, old._flags & REQUIRES_GRAD)
        content: Value = recorder.call(with_content, (before, new), {})
    return content


def _unseen_by_autograd(recorder: RecordedCalls, old: Value, new: Value) -> Value:
    """The new content of a Value as its later readers see it: what was written under `no_grad` keeps its gradient."""
    return new if _counts_for_gradients(recorder) else _with_gradient_of(recorder, old, new)


def _assign(v: Value, new: Value) -> None:
    v._value, v._type, v._flags = new._value, new._type, new._flags & REQUIRES_GRAD


def rebind(recorder: RecordedCalls, v: Value, new: Value, name: str) -> None:
    """Give v, and what it is a view of, the new content. Views of it are recorded anew when they are used."""
    path = [v]
    while (view := view_of(path[-1])) is not None:
        path.append(view.source)
    root = path[-1]
    if root._flags & COPIED_ROW:
        raise InPlaceError(
            f"{name} writes to a row of a parameter or buffer, which all instances share: clone() it first{at_line()}"
        )
    if root._flags & CONSTANT:
        if (tensor := _tensor_shown(path)) is None:
            raise InPlaceError(
                f"{name} writes through a view into a real tensor, which stays real: clone() it first{at_line()}"
            )
        becomes_value(recorder, tensor, root, name)
        rebind(recorder, refresh(v), new, name)
        return
    if len(path) == 1:
        reshaped = new._type != v._type
        _assign(v, new if reshaped else _unseen_by_autograd(recorder, v, new))
        v._writes += not reshaped
        return
    if new._type != v._type:
        raise InPlaceError(f"{name} changes the shape of a tensor that has views{at_line()}")
    shown = _place_shown(v)
    if shown is not None and _counts_for_gradients(recorder):
        _assign(v, new)
        _write_row(*shown, new)
        v._view.seen = root._writes
        return
    contents = [new]
    for node, source in itertools.pairwise(path):
        contents.append(_scatter(recorder, source, node, contents[-1], name))
    root._writes += 1
    for node, content in zip(path, contents, strict=True):
        _assign(node, _unseen_by_autograd(recorder, node, content))
        if (view := view_of(node)) is not None:
            view.seen = root._writes


def _tensor_shown(path: Sequence[Value]) -> torch.Tensor | None:
    """The real tensor of which a value chose the row that these are views of (`count[i] += 1`); None for others."""
    call = path[-2]._view.call if len(path) > 1 else None
    chosen = call[1][0] if call is not None and call[0] is take_at else None
    return chosen if type(chosen) is torch.Tensor else None


def _scatter(recorder: RecordedCalls, source: Value, node: Value, new: Value, name: str) -> Value:
    """The content of `source` after its view `node` was given the content `new`."""
    view = view_of(node)
    assert view is not None
    if view.call is None:
        raise InPlaceError(f"{name} writes to a view that a module made: clone() it first{at_line()}")
    func, args, kwargs = view.call
    label = getattr(func, "__name__", "")
    if label in NEEDS_STRIDES:
        raise InPlaceError(
            f"{name} writes to the result of {label}(), which is a view or a copy depending on strides: use "
            f"view() or clone(){at_line()}"
        )
    if not args or (value_of(args[0]) if type(args[0]) is WrittenTensor else args[0]) is not source:
        raise InPlaceError(f"{name} writes to a view made by {label}() that can't be recorded{at_line()}")
    if label in _DETACHING:
        _refuse_saved(recorder, source, name)
        return _with_gradient_of(recorder, source, new)
    written = _turned_back(recorder, source, new, label, args[1:], kwargs)
    if written is None:
        written = recorder.call(write_through, (source, new, func, view.output, *args[1:]), kwargs)
    counts = view.grad or not recorder.knowledge.grad
    return written if counts else _with_gradient_of(recorder, source, written)


def _named(names: str) -> frozenset[str]:
    return frozenset(names.split())


# For the backward pass: what keeps neither what it gives nor what it reads but masks and indices, what keeps the one,
# what the other.
_VIEWS = _named(
    "getitem take_row take_at unbind select squeeze unsqueeze view view_as t transpose permute narrow split chunk "
    "detach data expand expand_as diagonal contiguous alias unflatten movedim swapaxes"
)
_KEEPS_NOTHING = _VIEWS | _named(
    "add radd sub rsub neg cat stack sum mean clone to float double reshape flatten masked_fill where index_select "
    "gather with_content write_through put_at index_copy scatter copied zeroed fill setitem"
)
_KEEPS_ITS_RESULT = _named("sigmoid tanh exp relu softmax log_softmax sqrt rsqrt")
_KEEPS_WHAT_IT_READS = _named(
    "mul rmul truediv matmul mm bmm mv dot addmm baddbmm linear embedding pow log sin cos square abs "
    "take_parameter_row row_at"
)
_LAYERS = {torch.nn.Linear: "linear", torch.nn.Embedding: "embedding"}


def _refuse_saved(recorder: RecordedCalls, v: Value, name: str) -> None:
    """InPlaceError where a write that autograd does not see may be to what a call before keeps for its backward pass,
    which then reads what was written."""
    if not (recorder.graded or recorder.knowledge.grad):
        return
    memory, is_mask = {v._value}, not recorder.type_of(v).differentiable  # or an index
    while (view := view_of(v)) is not None:
        v = view.source
        memory.add(v._value)
    inputs, unmade = recorder.inputs, set(memory)
    # Of each call: its name, whether it may keep something, what it reads and gives.
    calls: list[tuple[str, bool, set[int], range]] = []
    for s, first, end in recorder.last_calls():
        outputs = range(first, first + len(s.outputs))
        kind, target = s.operation.kind, s.operation.target
        keeps = kind not in ("constant", "number") and any(t.differentiable for t in s.outputs)
        called = s.name if kind == "function" else _LAYERS.get(type(target), "")
        read = {n for k in range(len(s.inputs)) if (n := inputs[end + k]) not in recorder.number_of}
        calls.append((called, keeps, read or {-1}, outputs))
        unmade.difference_update(outputs)
        if not unmade:
            break
    saved, detached = bool(unmade), set[int]()
    for called, keeps, read, outputs in reversed(calls):
        if (reads := not memory.isdisjoint(read)) and called in _VIEWS:
            memory.update(outputs)
            detached.update(outputs if called in _DETACHING or read <= detached else ())
        quiet = not keeps or read <= detached or (called in _KEEPS_NOTHING and not is_mask)
        makes = not memory.isdisjoint(outputs)
        saved = saved or (reads and not quiet and called not in _KEEPS_ITS_RESULT)
        saved = saved or (makes and not quiet and called not in _KEEPS_WHAT_IT_READS)
    if saved:
        raise InPlaceError(
            f"{name} writes, past autograd, to what a call before may keep for its backward pass, which would read "
            f"what is written: use a new tensor, as masked_fill() and clamp() give{at_line()}"
        )


def _turned_back(
    recorder: RecordedCalls, source: Value, new: Value, label: str, rest: Sequence[object], kwargs: object
) -> Value | None:
    """The content of `source` after a view was given this content that is a row chosen by a value, or all of it in
    another shape; None for other views."""
    if label == take_at.__name__:
        return recorder.call(put_at, (source, *rest, new), {})
    t, of_new = recorder.type_of(source), recorder.type_of(new)
    if kwargs or t.dtype is not of_new.dtype or math.prod(t.shape) != math.prod(of_new.shape):
        return None
    if label in _SAME_ORDER:
        return recorder.call(torch.Tensor.reshape, (new, tuple(t.shape)), {})
    return recorder.call(torch.Tensor.transpose, (new, *rest), {}) if label == "transpose" else None


def write_through(
    base: torch.Tensor,
    new: torch.Tensor,
    func: Callable[..., object],
    output: int,
    *args: object,
    **kwargs: object,
) -> torch.Tensor:
    """`base` with its view `func(base, *args, **kwargs)` (leaf `output` of it) replaced by `new`."""
    copy = base.clone()
    view = tree_leaves(func(copy, *args, **kwargs))[output]
    view.copy_(new)
    return copy


def _counts_for_gradients(recorder: RecordedCalls) -> bool:
    """Whether what is written now counts for gradients as what is computed does."""
    return bool(recorder.knowledge.grad) or not recorder.graded


def _place_shown(v: Value) -> tuple[Value, tuple[int, ...]] | None:
    """Which row of which value a view is, `x[i]`, `x[i][j]` or `x[i, j]`; None for other views."""
    place: tuple[int, ...] = ()
    while (view := view_of(v)) is not None:
        index = view.call[1][1] if view.call is not None and view.call[0] is GETITEM else None
        at = place_in(view.source.shape, index)
        if at is None:
            return None
        place, v = at + place, view.source
    return v, place


def _write_row(v: Value, place: tuple[int, ...], row: Value) -> None:
    """Give a row of a value this content; the value's own is recorded when it is used as a whole."""
    rows = getattr(v, "_rows", None)
    if rows is None or depth_of(rows) != len(place):
        refresh(v)
        rows = v._rows = {} if len(place) == 1 else Places(len(place))
    rows[row_number(v.shape, place)] = new_value(
        v._recorder, row._value, row._type, row._flags & REQUIRES_GRAD
    )
    v._flags |= row._flags & REQUIRES_GRAD  # and so it does when the row is written to again
    v._writes += 1


def set_row(recorder: RecordedCalls, args: tuple[Any, ...]) -> bool:
    """`x[i] = v`, `x[i, j] = v`, `x[:, t] = v` for a number or a row v of x's type; False where it is another write."""
    if len(args) != 3 or type(args[1]) not in (int, tuple) or not isinstance(args[0], torch.Tensor):
        return False
    target, index, row = args
    if type(target) is not Value and (type(row) is not Value or _is_shared(recorder, target)):
        return False
    v = target if type(target) is Value else recorder.constant(target)
    within = None if v is None else place_within(v.shape, index)
    if v is None or within is None:
        return False
    t, (place, ones) = recorder.type_of(v), within
    floating = t.dtype.is_floating_point
    if (type(row) is int and (floating or t.dtype is torch.int64)) or (type(row) is float and floating):
        row = recorder.number(float(row) if floating else row, t.dtype, t.device)
        row = row.expand(t.shape[len(place) :]) if len(place) < len(t.shape) else row
    if type(row) is not Value:
        return False
    of_row, shape = recorder.type_of(refresh(row)), t.shape[len(place) :]
    if of_row.shape not in (shape, (1,) * ones + shape) or (t.dtype, t.device) != (
        of_row.dtype,
        of_row.device,
    ):
        return False
    if not _counts_for_gradients(recorder):
        return False
    while row.dim() > len(shape):
        row = row.squeeze(0)
    if v is not target:
        v = becomes_value(recorder, target, v, "setitem")
    shown = _place_shown(v)
    if shown is None or shown[0]._flags & (CONSTANT | COPIED_ROW):
        return False
    whole, before = shown
    _write_row(whole, before + place, row)
    if v is whole and len(place) == 1:
        _note_rows(recorder, v, row)
    return True


def _note_rows(recorder: RecordedCalls, v: Value, row: Value) -> None:
    """Such rows may be written to such values: C does it from now on."""
    recorder.row_calls[recorder.knowledge.mode, v._type, row._type] = v.shape[0]


def stores_what_is_there(args: tuple[Any, ...]) -> bool:
    """Whether `x[i] = v` has for v the view `x[i]`, as it is: what follows `x[i] += h`."""
    if len(args) != 3 or type(args[2]) is not Value or is_stale(args[2]):
        return False
    target, index, row = args
    view, rows = view_of(row), (GETITEM, take_at)
    if view is None or view.call is None or view.source is not target or view.call[0] not in rows:
        return False
    at = view.call[1][1]
    place = place_in(target.shape, index)
    if place is None or place != place_in(target.shape, at):
        return index is at
    if len(place) == 1:
        _note_rows(target._recorder, target, row)
    return True


def _as_made(key: Any) -> torch.Tensor:
    """What a call of a factory gives. key: as C made it, the function first, its arguments and their names last."""
    args, names = key[-2], key[-1] or ()
    first = len(args) - len(names)
    t: torch.Tensor = key[0](*args[:first], **dict(zip(names, args[first:], strict=True)))
    return t


def filled(recorder: RecordedCalls, key: Any) -> object:
    """What a call of a factory gives, to whose tensors values were written before: a value, all calls one."""
    t = _as_made(key)
    if type(t) is not torch.Tensor or t.is_inference():
        return t
    v = recorder.constant_of_own(t)
    recorder.filled[key] = v._value, v._type
    return new_value(recorder, v._value, v._type, 0)


def note_uses(recorder: RecordedCalls, *, asks: bool) -> None:
    """A recording is over. Factories whose tensors were often used give values from the next one on, as long as the
    forward asks for none: what Python asks of a real tensor is at hand, of a value it is waited for."""
    table, used = recorder.table, recorder.table.used
    if used is None or recorder.uses is None:
        return
    if asks:
        table.filled -= used
        table.used = None
        return
    often = {key: x[-1] for key, x in recorder.uses.items() if len(x) >= OFTEN and key not in table.filled}
    for key, t in often.items():
        if type(t) is not torch.Tensor:  # it has become a value
            continue
        if t.dtype.is_floating_point and not t.requires_grad and key[0] is not _EMPTY:
            _note_factory(recorder, key, t)
    used |= often.keys() & table.filled


def _note_factory(recorder: RecordedCalls, key: tuple[object, ...] | None, t: torch.Tensor) -> None:
    """A call of a factory that made a tensor gives a value from the next recording on. What others have left at its
    place in memory is not as it was made."""
    calls = recorder.table.filled
    if key is None or key in calls or len(calls) >= MANY_FILLED:
        return
    fresh = _as_made(key)
    if (fresh.shape, fresh.dtype) == (t.shape, t.dtype) and (key[0] is _EMPTY or torch.equal(fresh, t)):
        calls.add(key)


def becomes_value(recorder: RecordedCalls, t: torch.Tensor, value: Value, name: str) -> Value:
    """A real tensor that is about to be written to stands for a value from here on; `value` is its content until now.

    InPlaceError where something else shares its memory.
    """
    value._writes += 1  # values that are views of it are looked up anew, in what it stands for
    _note_factory(recorder, recorder.made_by.pop(id(t), None), t)
    if type(t) is torch.Tensor and type(t._base) is torch.Tensor:
        return _view_becomes_value(recorder, t, t._base, name)
    _let_go_of_views(recorder, t)
    reason = _why_not(t)
    if not reason and t.is_leaf and t.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    before = None if reason else _exchanged(t)
    if before is None:
        raise _refused(t, reason or "a view of it, or the graph of its gradient, holds its memory", name)
    recorder.hold_instead(t, before)
    content = new_value(recorder, value._value, value._type, value._flags & REQUIRES_GRAD)
    _follow(recorder, t, Written(before, content))
    return content


def _view_becomes_value(recorder: RecordedCalls, t: torch.Tensor, base: torch.Tensor, name: str) -> Value:
    """A view of a real tensor that is about to be written to (`buffer[i] += h`): the tensor that it shows becomes a
    value, and it a view of that."""
    _let_go_of_views(recorder, base)
    reason = _why_not(base, users=2)
    if not reason and (base.requires_grad or t.requires_grad or weakref.getweakrefcount(t)):
        reason = "a view of it is looked at by something else"
    if reason:
        raise _refused(base, reason, name)
    index = _index_of(t, base)
    if index is None:
        raise _refused(base, "a view of it is no part along its dimensions", name)
    before = t.clone()
    recorder.hold_instead(t, before)
    let_go = torch.empty(0)
    torch.utils.swap_tensors(t, let_go)
    del let_go  # the view's own hold of the memory
    constant = recorder.constant(base)
    assert constant is not None
    value = becomes_value(recorder, base, constant, name)
    view = value[index]
    _exchanged(t)
    _follow(recorder, t, Written(before, view))
    return view


def _index_of(t: torch.Tensor, base: torch.Tensor) -> object:
    """The index by which a view was taken of a tensor: rows and slices of step one; None for other views."""
    if not base.is_contiguous() or not t.numel():
        return None
    offset, j = t.storage_offset() - base.storage_offset(), 0
    index: list[int | slice] = []
    for size, stride in zip(base.shape, base.stride(), strict=True):
        start, offset = divmod(int(offset), int(stride))
        if j < t.dim() and t.stride(j) == stride and start + t.shape[j] <= size:
            index.append(slice(start, start + t.shape[j]))
            j += 1
        else:
            index.append(start)
    while len(index) > 1 and index[-1] == slice(0, base.shape[len(index) - 1]):
        index.pop()
    if not index:
        return None
    wanted = base[tuple(index)]
    geometry = wanted.shape, wanted.stride(), wanted.storage_offset()
    if geometry != (t.shape, t.stride(), t.storage_offset()):
        return None
    return index[0] if len(index) == 1 else tuple(index)


def _let_go_of_views(recorder: RecordedCalls, t: torch.Tensor) -> None:
    """Calls that have met views of a tensor keep what these held: nothing here shares its memory any more."""
    views = recorder.views_met.pop(id(t), [])
    while views:
        recorder.hold_a_copy(views.pop())


def _exchanged(t: torch.Tensor) -> torch.Tensor | None:
    """The tensor as it was, as another object, itself without memory; None where something holds its memory."""
    stand_in: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        WrittenTensor, t.shape, strides=t.stride(), dtype=t.dtype, device=t.device
    )
    stand_in.__class__ = torch.Tensor
    try:
        torch.utils.swap_tensors(t, stand_in)
    except RuntimeError:
        return None
    return stand_in  # the two have changed places


def _follow(recorder: RecordedCalls, t: torch.Tensor, written: Written) -> None:
    t.__class__ = WrittenTensor
    vars(t)[RECORD] = written
    place, followed = id(t), recorder.written
    followed[place] = weakref.ref(t, lambda _: followed.pop(place, None)), written


def _refused(t: torch.Tensor, reason: str, name: str) -> InPlaceError:
    return InPlaceError(
        f"{name} writes a value into a tensor {tuple(t.shape)} that has to stay as it is: {reason}. Write to a "
        f"clone() of it, or build the result with torch.stack or torch.cat{at_line()}"
    )


def _why_not(t: torch.Tensor, users: int = 1) -> str:
    """Why a tensor can't stand for a value; "" where it can. users: how many tensors may have its memory."""
    if type(t) is not torch.Tensor or t.layout is not torch.strided or t.is_inference():
        return f"it is a {type(t).__name__} of its own kind"
    if not t.untyped_storage().resizable():
        return "numpy or another process shares its memory"
    if t._base is not None:
        return "it is a view of another tensor"
    if weakref.getweakrefcount(t):
        return "something refers to it weakly"
    if storage_users(t) > users:
        return "another tensor shares its memory"
    return ""
