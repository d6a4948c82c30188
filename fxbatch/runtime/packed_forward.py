"""The whole forward as one operation on packed rows, where instances are tensors with sizes of their own.

In: a decorated forward and a minibatch whose instances are tensors: [T, 64], with another T in each. Out: its results,
by one PackedFunction over all instances, or None where the forward is no such operation.

    packed = PackedForward(ForwardCode(options, model))
    packed.call(Model.forward, instances, "stack")         # (results,)

A forward is packed when sizes differ in a minibatch, its code can be known (as for any operation: what it reads is
compared each minibatch), and its graph can be traced with symbols for the sizes. Instances for whose sizes the graph
is not the forward get a graph of their own, or run by themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import InitVar, dataclass, field
from typing import Any

import numpy as np
import torch

from fxbatch.caches import Cache, cached
from fxbatch.errors import BatchCoupledError, FxbatchError
from fxbatch.mistakes import report
from fxbatch.ragged.batch_norm import batch_norm_as_nodes, trackers
from fxbatch.ragged.check import check_against_body
from fxbatch.ragged.lower import DENSE, WHOLE
from fxbatch.ragged.packed_function import PackedFunction, PackedMinibatch
from fxbatch.ragged.symbolic import MOST_SIZES, NoPackedForm, WithoutPlainSizes
from fxbatch.runtime.argument_objects import Instance, Opened, TensorColumns, closed, named, opened
from fxbatch.runtime.forward_code import ForwardCode
from fxbatch.runtime.refusals import unheard_mode
from fxbatch.runtime.results import gather
from fxbatch.signature import TensorSpec, Twins, bodies, structural_twin
from fxbatch.stopwatch import building
from fxbatch.torch_private import (
    EndOfCheckpoint,
    TreeSpec,
    any_autocast,
    children_of,
    inside_functorch,
    memory_is_real,
    reparametrized,
    tree_flatten,
    tree_unflatten,
    without_saved_tensor_hooks,
)
from fxbatch.trace.modules import changed_attribute
from fxbatch.trace.operations import BodyError, BodyRun, run_on_fakes
from fxbatch.trace.state import Bounds, autocast_state, current_recorder, sizes_of
from fxbatch.trace.table import ATOMS, ByIdentity, static_key

MOST_VARIANTS = 4  # graphs of one forward for different ranges of sizes
FEWEST = 8  # one in so many instances the first graph is to be for: four such are for half of them
MOST_FAILURES = 3  # minibatches in which a packed forward may raise before it is given up
MOST_UNLIKE = 4  # minibatches whose instances are not alike, one after another, before it is given up


@dataclass(frozen=True)
class _Kind:
    """The form of an instance without its sizes. Instances of one minibatch that run together have equal forms."""

    spec: TreeSpec
    plain: tuple[object, ...]  # keys of leaves that are no tensors
    tensors: tuple[object, ...]  # number of dimensions, dtype, device of each; whether it requires gradients


@dataclass
class Variant:
    """A packed function, and the structure of a result."""

    function: PackedFunction
    spec: TreeSpec
    names: list[str]
    trackers: dict[str, torch.Tensor] | None = None  # counters of BatchNorm layers that go over the minibatch
    calls: int = 0
    instances: int = 0


@dataclass
class PackedFamily:
    """The packed functions of a forward for one kind of instances."""

    differing: list[set[int]]  # per tensor the dimensions that have differed
    shapes: list[tuple[int, ...]]  # per tensor a shape that was met
    variants: list[Variant] = field(default_factory=list)
    reason: str = ""  # why it is not packed
    alone: int = 0  # instances that ran by themselves, as no graph was theirs
    built: int = 0
    failed: int = 0  # minibatches in which it raised something
    dynamic: tuple[tuple[int, ...], ...] = ()  # per tensor its own dimensions, in order

    def note(self, bounds: Sequence[Bounds]) -> None:
        """Take in the sizes of a minibatch; where another dimension differs, graphs are built anew."""
        changed = False
        for dims, (low, high), seen in zip(self.differing, bounds, self.shapes, strict=True):
            for d, size in enumerate(seen):
                if d not in dims and not low[d] == high[d] == size:
                    dims.add(d)
                    changed = True
        if changed:
            self.dynamic = tuple(tuple(sorted(dims)) for dims in self.differing)
            self.variants, self.reason, self.built = [], "", 0
        if sum(map(len, self.differing)) > MOST_SIZES or any(len(dims) > 2 for dims in self.differing):
            self.reason = "too many sizes of its own"


class PackedForward:
    """The packed forms of one decorated forward on one module."""

    def __init__(self, code: ForwardCode, may_build: Callable[[], bool] = lambda: True) -> None:
        self.code = code
        self.options = code.options
        self.may_build = may_build  # asked before a graph is built for what the first one is not for
        self.families: Cache[Hashable, PackedFamily] = Cache("packed families")
        self.numbers: set[int] = set()  # places of integers among the arguments that have differed
        self.unlike = 0  # minibatches of instances with other structures, one after another
        self.watched: list[Any] | None = None  # what ran, for `explain`
        self._lock = threading.RLock()

    def call(
        self, fn: Callable[..., object], instances: Sequence[Instance], out: str
    ) -> tuple[object] | None:
        """The results of a minibatch, or None."""
        if inside_functorch() or unheard_mode() or not memory_is_real():
            return None
        if current_recorder() is not None:
            return None
        with self._lock, without_saved_tensor_hooks():
            columns = self._columns(fn, instances)
            if columns is None:
                return None
            family = self._family(fn, columns)
            if family is None or family.reason:
                return None
            sizes = columns.sizes(family.dynamic)
            work = self._work(fn, family, columns, sizes)
        if work is None:
            return None
        try:
            return (self._run(fn, family, work, instances, columns, sizes, out),)
        except (FxbatchError, MemoryError, torch.OutOfMemoryError, EndOfCheckpoint):
            raise
        except Exception as error:  # noqa: BLE001 - recorded or one by one, it raises again what is the user's own mistake
            report(error, "a packed forward", verify=self.options.verify)
            family.failed += 1
            if family.failed > MOST_FAILURES:
                family.reason = f"it raised {type(error).__name__}"
            return None

    # -- which functions ------------------------------------------------------------------------------

    def _family(self, fn: object, columns: _Columns) -> PackedFamily | None:
        """The family of these instances, with the dimensions that have differed; None where none has."""
        bounds = columns.bounds
        differ = any(low != high for low, high in bounds)
        if (not differ and not self.families) or self.code.look(fn) is None:
            return None
        key = self._key(columns.kind)
        family = self.families.get(key)
        if family is None:
            if not differ:
                return None
            family = PackedFamily([set() for _ in bounds], [tuple(s[0].tolist()) for s in columns.shapes])
            self.families.put(key, family)
        family.note(bounds)
        return family if any(family.differing) else None

    def _key(self, kind: _Kind) -> object:
        """All that a packed function depends on but the sizes."""
        assert self.code.examined is not None
        needs = tuple(s.resolve().requires_grad for s in self.code.examined.shared)
        types = autocast_state() if any_autocast() else ()
        defaults = torch.get_default_dtype(), torch.get_default_device()
        return (self.code.content, kind, torch.is_grad_enabled(), defaults, needs, types)

    def _columns(self, fn: object, instances: Sequence[Instance]) -> _Columns | None:
        """The instances as columns; None where they are not alike."""
        if isinstance(instances, TensorColumns):
            plain = (_TENSOR,) * len(instances.columns)
            return _alike([list(c) for c in instances.columns], plain, tree_flatten((plain, {}))[1])
        once = bool(self.options.shared)
        args, kwargs = instances[0]
        if self.unlike > MOST_UNLIKE:
            return None  # not looked through again
        if not self.code.meets(args, kwargs):
            columns = _of_containers(instances, self.numbers, once=once)
        else:
            if (look := self.code.look(fn)) is None:
                return None
            names = look.reads.fields
            columns = _of_objects(instances, names) or _of_containers(
                instances, self.numbers, lambda x: opened(x, names), once=once
            )
        self.unlike = 0 if columns is not None else self.unlike + 1
        return columns

    def _work(
        self, fn: object, family: PackedFamily, columns: _Columns, sizes: Sequence[np.ndarray]
    ) -> list[tuple[Variant | None, np.ndarray | None]] | None:
        """Which variant runs which instances (None: all), and None for those that run by themselves."""
        if family.variants and family.variants[0].function.graph.certain(columns.smallest(family.dynamic)):
            return [(family.variants[0], None)]
        left = np.ones(columns.n, dtype=bool)
        work: list[tuple[Variant | None, np.ndarray | None]] = []
        for variant in family.variants:
            fits = variant.function.graph.fitting([s[left] for s in sizes])
            places = np.flatnonzero(left)[fits]
            if len(places):
                work.append((variant, places))
                left[places] = False
            if not left.any():
                return work
        if family.built < MOST_VARIANTS:
            places = np.flatnonzero(left)
            smallest = np.min([s[places] for s in sizes], axis=0)
            first = not family.variants
            if smallest.max() > 1 and (first or (len(places) > 1 and self.may_build())):
                family.built += 1
                with building():
                    new_variant = self._build(fn, columns, int(places[int(smallest.argmax())]), family)
                if new_variant is None:
                    return None
                family.variants.append(new_variant)
                if first and FEWEST * new_variant.function.graph.fitting(sizes).sum() < columns.n:
                    family.reason = "its code does something else for most sizes"
                    return None
                return self._work(fn, family, columns, sizes)
        if not family.variants:
            return None
        work.append((None, np.flatnonzero(left)))
        return work

    def _build(self, fn: object, columns: _Columns, example: int, family: PackedFamily) -> Variant | None:
        grad = torch.is_grad_enabled()
        try:
            # What is built stays, and serves calls outside of inference mode, too.
            with torch.inference_mode(False), torch.set_grad_enabled(grad):
                return self._built(fn, columns, example, family.dynamic)
        except (NoPackedForm, BodyError) as error:
            family.reason = str(error)
        except FxbatchError:
            family.reason = "the forward says why when it is recorded"
        except Exception as error:  # noqa: BLE001 - the forward is recorded then, and raises what is the user's own mistake
            family.reason = report(error, "a packed forward", verify=self.options.verify)
        return None

    def _built(
        self, fn: object, columns: _Columns, example: int, dynamic: tuple[tuple[int, ...], ...]
    ) -> Variant:
        tensors = [*[c[example] for c in columns.tensors], *columns.whole]
        examined, root = self.code.examined, self.code.root
        assert root is not None and examined is not None
        body = _Body(fn, root, examined.names, columns.kind, columns.plain, len(tensors))
        if examined.coupled:
            body.trackers = trackers(root)
        shared = [s.resolve() for s in examined.shared]

        def calls_of(i: int, *, plain: bool) -> tuple[BodyRun, int]:
            types = [TensorSpec.of(t) for t in [*[c[i] for c in columns.tensors], *columns.whole]]
            with WithoutPlainSizes() as mode:
                outcome = run_on_fakes(
                    body.once, types, shared, grad=torch.is_grad_enabled(), plain=plain,
                    loops=bool(self.options.plain),
                )  # fmt: skip
            if mode.lost_writes():
                raise BodyError("writes to a row that a tensor chose")
            return outcome, mode.calls

        three = [example, *_unlike(columns.sizes(dynamic), example)]
        if len(three) == len({calls_of(i, plain=True)[1] for i in three}) == 3:
            raise NoPackedForm("it makes another number of calls for each size, as a loop does")
        outcome, _ = calls_of(example, plain=False)
        if (changed := body.changed()) or outcome.written or outcome.written_shared or not outcome.outputs:
            raise BodyError(f"changes {changed}" if changed else "writes to what it was given")
        first = len(columns.tensors)
        operands = example_of([*columns.whole, *shared])
        function = PackedFunction.of(body, example_of(tensors[:first]), dynamic, operands, code=[fn, root])
        if body.spec is None:
            raise NoPackedForm("it returns something else than tensors")
        if body.trackers is None:
            fitting = np.flatnonzero(function.graph.fitting(columns.sizes(dynamic))).tolist() or [example]
            check_against_body(function, [[c[i] for i in fitting] for c in columns.tensors], operands)
        return Variant(function, body.spec, examined.names, body.trackers)

    # -- running --------------------------------------------------------------------------------------

    def _run(
        self,
        fn: Callable[..., object],
        family: PackedFamily,
        work: list[tuple[Variant | None, np.ndarray | None]],
        instances: Sequence[Instance],
        columns: _Columns,
        sizes: Sequence[np.ndarray],
        out: str,
    ) -> object:
        examined = self.code.examined
        assert examined is not None
        shared = [*columns.whole, *[s.resolve() for s in examined.shared]]
        if examined.coupled and len(work) != 1:
            raise BatchCoupledError(
                f'{examined.coupled} in training with batch_norm="minibatch": its code does something else for '
                "some sizes of this minibatch, so that there is no one set of rows to normalise over"
            )
        if len(work) == 1 and work[0][0] is not None:
            variant = work[0][0]
            outputs, z = self._packed(variant, columns.tensors, sizes, shared)
            if out == "stack":
                stacked = _stacked(variant, outputs, z)
                if stacked is not None:
                    return stacked
            results = _separate(variant, outputs, z)
        else:
            results = [None] * len(instances)
            for variant_or_none, places in work:
                assert places is not None
                chosen = places.tolist()
                if variant_or_none is None:
                    family.alone += len(chosen)
                    some_instances = [instances[i] for i in chosen]
                    with bodies:
                        results_of_some = [fn(*args, **kwargs) for args, kwargs in some_instances]
                else:
                    some = [[column[i] for i in chosen] for column in columns.tensors]
                    theirs = [s[places] for s in sizes]
                    outputs, z = self._packed(variant_or_none, some, theirs, shared)
                    results_of_some = _separate(variant_or_none, outputs, z)
                for i, result in zip(chosen, results_of_some, strict=True):
                    results[i] = result
        return gather(results, out)

    def _packed(
        self,
        variant: Variant,
        columns: Sequence[Sequence[torch.Tensor]],
        sizes: Sequence[np.ndarray],
        shared: list[torch.Tensor],
    ) -> tuple[list[torch.Tensor], PackedMinibatch]:
        outputs, z = variant.function(columns, shared, sizes, columns[0][0].device)
        for counter in (variant.trackers or {}).values():
            counter.add_(1)
        if self.watched is not None:
            self.watched.append((variant, z))
        variant.calls += 1
        variant.instances += z.n
        return outputs, z


def _unlike(sizes: Sequence[np.ndarray], example: int) -> list[int]:
    """Two other instances, if there are any, all of whose sizes are none of the example's, nor of one another."""
    chosen = [example]
    for i in range(len(sizes[0])):
        if len(chosen) < 3 and all(s[i] > 1 and s[i] not in s[chosen] for s in sizes):
            chosen.append(i)
    return chosen[1:] if len(chosen) == 3 else []


def example_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Leaves like these tensors: code may ask whether they require gradients."""
    return [t.detach().requires_grad_(t.requires_grad) for t in tensors]


@dataclass(eq=False)
class _Body:
    """The forward as a function of flat lists of tensors: an instance's, then the shared operands."""

    fn: Any
    root: InitVar[torch.nn.Module]
    names: list[str]
    kind: _Kind
    plain: tuple[object, ...]
    count: int
    spec: TreeSpec | None = None
    trackers: dict[str, torch.Tensor] | None = None  # counters of BatchNorm layers that are in training

    def __post_init__(self, root: torch.nn.Module) -> None:
        self.twins: Twins = {}
        self.twin = structural_twin(root, self.twins)

    def once(self, tensors: Sequence[torch.Tensor], shared: Sequence[torch.Tensor]) -> object:
        """The forward's own result."""
        tensors_left = iter(tensors)
        filled = [
            next(tensors_left) if x is _TENSOR else next(tensors_left).shape[0] if x is _NUMBER else x
            for x in self.plain
        ]
        leaves = [next(tensors_left) if x is _TENSOR_OF_ALL else x for x in filled]
        args, kwargs = closed(tree_unflatten(leaves, self.kind.spec))
        now = dict(zip(self.names, shared, strict=True))
        before = dict(now)
        for name in self.trackers or ():  # they count minibatches, when one has run
            owner, _, attribute = name.rpartition(".")
            self.twin.get_submodule(owner)._buffers[attribute] = None
            del now[name]
        as_nodes = nullcontext() if self.trackers is None else batch_norm_as_nodes()
        with bodies, as_nodes, reparametrized(self.twin, now):
            result = self.fn(self.twin, *args, **kwargs)
        if any(now[name] is not before[name] for name in now):
            raise BodyError("changes one of its tensors")
        left, spec = tree_flatten(opened((args, kwargs), None))
        if spec != self.kind.spec or any(x is not y for x, y in zip(left, leaves, strict=True)):
            raise BodyError("changes an object that it was given")
        return result

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        leaves, spec = tree_flatten(self.once(tensors[: self.count], tensors[self.count :]))
        if not all(isinstance(x, torch.Tensor) for x in leaves) or not leaves:
            raise NoPackedForm("it returns something else than tensors")
        if self.spec is not None and self.spec != spec:
            raise NoPackedForm("its result has another structure for other sizes")
        self.spec = spec
        return leaves

    def changed(self) -> str:
        """The name of an attribute that a run has set, else ""."""
        return changed_attribute(self.twins)


_TENSOR, _TENSOR_OF_ALL, _NUMBER = object(), object(), object()
_GIVEN = (_TENSOR, _TENSOR_OF_ALL, _NUMBER)


@dataclass
class _Columns:
    """The instances of a minibatch as columns."""

    kind: _Kind
    plain: tuple[object, ...]  # the leaves of an instance, _TENSOR for each tensor, _NUMBER for its integers
    tensors: list[list[torch.Tensor]]  # per tensor leaf, those of all instances
    shapes: list[np.ndarray]  # int64 [n, dimensions] each
    bounds: list[Bounds]
    whole: list[torch.Tensor] = field(default_factory=list)  # given once for all instances

    @property
    def n(self) -> int:
        return len(self.tensors[0])

    def sizes(self, dynamic: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """int64 [n] for each of these dimensions."""
        return [
            np.ascontiguousarray(shapes[:, d])
            for shapes, dims in zip(self.shapes, dynamic, strict=True)
            for d in dims
        ]

    def smallest(self, dynamic: Sequence[Sequence[int]]) -> list[int]:
        """The smallest size of each of these dimensions."""
        return [low[d] for (low, _), dims in zip(self.bounds, dynamic, strict=True) for d in dims]


def _of_containers(
    instances: Sequence[Instance],
    numbers: set[int],
    opened: Callable[[object], object] = lambda x: x,
    *,
    once: bool = False,
) -> _Columns | None:
    """The instances as columns of tensors; None where they are not alike or hold something else than plain data.
    numbers: places of integers that have differed, which are sizes; once: whether a tensor that all instances have is
    given once."""
    args, kwargs = instances[0]
    leaves, spec = tree_flatten(opened((args[1:], kwargs)))
    plain = [_TENSOR if isinstance(x, torch.Tensor) else x for x in leaves]
    if _TENSOR not in plain or not all(x is _TENSOR or type(x) in ATOMS for x in plain):
        return None
    classes = _named(spec)
    if classes is None:
        return None
    rows = []
    for args, kwargs in instances:
        flat, other = tree_flatten(opened((args[1:], kwargs)))
        if other != spec:
            return None
        rows.append(flat)
    columns: list[list[torch.Tensor]] = []
    whole: list[torch.Tensor] = []
    for i, column in enumerate(zip(*rows, strict=True)):
        if plain[i] is _TENSOR:
            if not all(isinstance(x, torch.Tensor) for x in column):
                return None
            if once and all(x is column[0] for x in column):
                plain[i] = _TENSOR_OF_ALL
                whole.append(column[0])
            else:
                columns.append(list(column))
        elif i in numbers or not _all_equal(column):
            if not all(type(x) is int and x >= 0 for x in column):
                return None
            numbers.add(i)
            plain[i] = _NUMBER
            columns.append(list(map(_as_size, column)))
    return _alike(columns, tuple(plain), spec, classes, whole)


@cached("sizes of integers")
def _as_size(number: int) -> torch.Tensor:
    """A tensor without elements that has this size: an integer of an instance is a size of its own."""
    return torch.empty(number, 0, device="cpu")


def _of_objects(instances: Sequence[Instance], names: frozenset[str] | None) -> _Columns | None:
    """The columns of instances that are one object each, if the attributes that count are all tensors; else None."""
    args, kwargs = instances[0]
    first = opened(args[1], names) if len(args) == 2 and not kwargs else None
    if type(first) is not Opened or not all(type(v) is torch.Tensor for v in first.values):
        return None
    rows = []
    for args, kwargs in instances:
        if len(args) != 2 or kwargs or type(args[1]) is not first.kind:
            return None
        held, unread = named(args[1], names)
        if tuple(held) != first.names or unread != first.unread:
            return None
        rows.append(list(held.values()))
    leaves, spec = tree_flatten(((first,), {}))
    return _alike([list(c) for c in zip(*rows, strict=True)], (_TENSOR,) * len(leaves), spec)


_OF_ALL_NAMED = frozenset((
    "__doc__", "__module__", "__slots__", "_fields", "_field_defaults", "__annotations__", "__orig_bases__",
    "__match_args__", "__annotate__", "__annotate_func__", "__static_attributes__", "__firstlineno__", "__dict__",
))  # fmt: skip


def _named(spec: TreeSpec) -> tuple[object, ...] | None:
    """Members of the named tuples' classes besides their fields (methods and numbers that code may read), as a key;
    None if one of them can't be compared."""
    members: list[object] = []
    classes = [spec.context] if isinstance(spec.context, type) else []
    for cls in (c for base in classes for c in base.__mro__ if c not in (tuple, object)):
        for name, value in vars(cls).items():
            if name in _OF_ALL_NAMED:
                continue
            if type(value) not in ATOMS and not hasattr(type(value), "__get__"):
                return None
            members.append((name, static_key(value) if type(value) in ATOMS else ByIdentity(value)))
    for child in children_of(spec):
        inner = _named(child)
        if inner is None:
            return None
        members += inner
    return tuple(members)


def _alike(
    columns: list[list[Any]],
    plain: tuple[object, ...],
    spec: TreeSpec,
    classes: tuple[object, ...] = (),
    whole: Sequence[Any] = (),
) -> _Columns | None:
    """These columns, where the tensors of each may differ in their sizes alone."""
    kinds, shapes, bounds = [], [], []
    for column in columns:
        first = column[0]
        met = sizes_of(column) if type(first) is torch.Tensor else None
        if met is None:
            return None
        if first.layout is not torch.strided:  # torch.cat refuses other devices and layouts among them
            return None
        kinds.append((first.dim(), first.dtype, first.device, first.requires_grad))
        shapes.append(met[0])
        bounds.append(met[1])
    if len({device for _, _, device, _ in kinds} | {t.device for t in whole}) != 1 or not columns:
        return None
    if any(type(t) is not torch.Tensor or t.layout is not torch.strided for t in whole):
        return None
    kinds += [(t.shape, t.dtype, t.device, t.requires_grad) for t in whole]
    keys = tuple(x if x in _GIVEN else static_key(x) for x in plain)
    return _Columns(_Kind(spec, keys + classes, tuple(kinds)), plain, columns, shapes, bounds, list(whole))


def _all_equal(column: Sequence[object]) -> bool:
    first = column[0]
    if all(x is first for x in column):
        return True
    return all(type(x) in ATOMS for x in column) and len(set(map(static_key, column))) == 1


def _stacked(variant: Variant, outputs: list[torch.Tensor], z: PackedMinibatch) -> object:
    """Results stacked on a new first dimension; None where they can't be, or only one by one."""
    stacked = []
    for output, tensor in zip(variant.function.lowered.outputs, outputs, strict=True):
        if output.layout == DENSE:
            stacked.append(tensor)
        elif output.layout == WHOLE:
            stacked.append(tensor.expand(z.n, *tensor.shape).clone())
        else:
            return None
    return tree_unflatten(stacked, variant.spec)


def _separate(variant: Variant, outputs: list[torch.Tensor], z: PackedMinibatch) -> list[object]:
    """A result an instance."""
    columns = variant.function.apart(outputs, z)
    return [tree_unflatten(list(row), variant.spec) for row in zip(*columns, strict=True)]
