"""Changes that the instances of a minibatch make to modules that they share: seen, so that none sees another's.

In: attributes as they are set, containers that modules hold as they were. Out: whether anything was changed, and where;
all of it as it was before, where the minibatch is run anew.

    changes = ModuleChanges(modules)
    changes.note(module, "h", value)     # about to be set
    changes.first()                      # "Model.h is set (model.py:12)", "" where nothing was changed
    changes.undo()                       # whether all is as it was

An instance that waits for a value lets the others run. What it has set on modules they would find, and it would find
theirs: so a minibatch that does both is run by the plain loop (`minibatch`). What is shared otherwise (globals,
closures) isn't looked at: README, "What instances share".
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch.nn.parameter import is_lazy

from fxbatch.errors import TraceError
from fxbatch.trace.places import TABLES
from fxbatch.trace.plain_objects import is_settings
from fxbatch.trace.user_line import at_line

_CONTAINERS = (list, dict, set, deque, bytearray)
_MANY = 1000  # of a container of more items only their number is compared
_TORCHS_OWN = frozenset((*vars(torch.nn.Module()), "_fxbatch_engines"))
_ABSENT: Any = object()
MOST_COPIED = 64 << 20  # bytes of a model whose parameters are copied, too, while its scouts run
_WATCHED = frozenset({*_CONTAINERS, torch.Tensor})


class Container(NamedTuple):
    """A list, dictionary or set that a module holds, or an object of a user's plain class; or one that these hold."""

    module: torch.nn.Module
    name: str
    container: Any
    content: tuple[Any, ...] | None  # None: it has too many items
    length: int

    @staticmethod
    def of(holders: Iterable[tuple[torch.nn.Module, str]]) -> list[Container]:
        """As they are now, and as objects in them are. An object is the dictionary of its attributes."""
        containers, seen, kinds, looked = [], set[int](), dict[type, bool](), 0
        todo = deque((module, name, module.__dict__[name]) for module, name in holders)
        while todo:
            module, name, x = todo.popleft()
            is_object = _is_object(x, kinds)
            if id(x) in seen or not (is_object or isinstance(x, _CONTAINERS)):
                continue
            seen.add(id(x))
            held = vars(x) if is_object else x
            content = _content(held) if len(held) <= _MANY else None
            containers.append(Container(module, name, held, content, len(held)))
            looked += len(held)
            if looked > _MANY or content is None or isinstance(x, bytearray):
                continue  # what is in it is not looked at
            inside = held.items() if is_object else [("", y) for y in content]
            todo += [(module, f"{name}.{k}" if k else name, y) for k, y in inside if y is not module]
        return containers

    def is_changed(self) -> bool:
        """Whether it holds other items than it did."""
        if len(self.container) != self.length:
            return True
        return self.content is not None and not all(map(operator.is_, _content(self.container), self.content))

    def put_back(self) -> bool:
        """Whether it holds again what it held."""
        if not self.is_changed():
            return True
        x, content = self.container, self.content
        if content is None:
            return False
        if isinstance(x, (list, bytearray)):
            x[:] = content
        else:
            x.clear()
            half = len(content) // 2
            if isinstance(x, dict):
                for key, value in zip(content[:half], content[half:], strict=True):
                    x[key] = value
            else:
                (x.update if isinstance(x, set) else x.extend)(content)
        return True


def _is_object(x: object, kinds: dict[type, bool]) -> bool:
    """Whether it is an object of a user's plain class. kinds: of classes, which are such."""
    if type(x) not in kinds:
        kinds[type(x)] = not isinstance(x, dict) and is_settings(x)
    return kinds[type(x)]


def _content(x: Any) -> tuple[object, ...]:
    return (*x, *x.values()) if isinstance(x, dict) else tuple(x)


def containers_of(modules: Iterable[torch.nn.Module]) -> tuple[tuple[torch.nn.Module, str], ...]:
    """Modules, and the names of their attributes that are containers or objects of users' plain classes, but for those
    that torch looks after."""
    kinds: dict[type, bool] = {}
    return tuple(
        (module, name)
        for module in modules
        for name, x in module.__dict__.items()
        if name not in _TORCHS_OWN and (isinstance(x, _CONTAINERS) or _is_object(x, kinds))
    )


def _state(x: Any) -> int:
    """How many items a container has, how often a tensor was written to."""
    if type(x) is not torch.Tensor:
        return len(x)
    return -1 if x.is_inference() else x._version


def states_of(args: Iterable[object]) -> list[tuple[object, int]]:
    """Lists and tensors among the arguments of an instance, as they are now."""
    return [(x, _state(x)) for x in args if type(x) in _WATCHED]


def are_unchanged(states: Iterable[tuple[object, int]]) -> bool:
    """Whether they are as they were, so that the instance can begin anew."""
    return all(_state(x) == state for x, state in states)


class _Before(NamedTuple):
    """An attribute as it was: in this table of the module; None where it had none."""

    module: torch.nn.Module
    name: str
    table: dict[str, object] | None
    value: object


def _before(module: torch.nn.Module, name: str) -> _Before:
    for table in (module.__dict__, *(module.__dict__[t] for t in TABLES if t in module.__dict__)):
        if name in table:
            return _Before(module, name, table, table[name])
    return _Before(module, name, None, _ABSENT)


class ModuleChanges:
    """The changes that one recording has made to modules that its instances share."""

    def __init__(self, containers: Sequence[tuple[torch.nn.Module, str]] = ()) -> None:
        self._attributes: dict[tuple[int, str], _Before] = {}  # that were set, in order
        self._containers = Container.of(containers)
        self._arguments: list[tuple[object, int]] = []
        self.seen = ""  # the first that was seen as it was made, with the line
        self.lasts = False  # whether something was changed that `undo` does not know
        self.begun = 0  # instances
        self.open = 0  # those of them that are not done
        self.waited = ""  # where the first of them waited, with the line; "" where none has
        self.refused = False  # whether a change is an error as soon as some instance has waited

    def note(self, module: torch.nn.Module, name: str, value: object = _ABSENT) -> None:
        """An attribute is about to be set, or deleted. TraceError where instances that wait may have read it."""
        before = _before(module, name)
        if before.value is value is not _ABSENT:
            return
        self._attributes.setdefault((id(module), name), before)
        self._note(f"{type(module).__name__}.{name} is set")

    def note_lasting(self, module: torch.nn.Module, method: str) -> None:
        """Something is about to be changed that can't be taken back: hooks, the types of parameters."""
        self.lasts = True
        self._note(f"{type(module).__name__}.{method}() changes the module")

    def _note(self, change: str) -> None:
        if not self.seen:
            self.seen = f"{change}{at_line()}"
        if self.waited and (self.refused or self.open > 1):
            raise self.refusal(self.seen)

    def refusal(self, change: str) -> TraceError:
        """The error for this change."""
        return TraceError(
            f"{change}, and an instance {self.waited}: while it waits others run, and they would change the same. "
            'Keep it in a local variable, give it back as a result, or use @fxbatch.autobatch(adaptive="loop")'
        )

    def first(self) -> str:
        """The first change, "" where there is none."""
        self.seen = self.seen or self.changed_container()
        return self.seen

    def changed_container(self) -> str:
        """`first` of containers alone."""
        return _first_changed(self._containers)

    def watch(self, instances: Iterable[tuple[tuple[object, ...], dict[str, object]]]) -> None:
        """Look at lists and tensors that are arguments: an instance that has changed its own can't begin anew."""
        for args, _ in instances:
            self._arguments += states_of(args)

    def forget(self) -> None:
        """Nothing is undone any more."""
        self._attributes.clear()
        self._containers.clear()
        self._arguments.clear()

    @property
    def attributes(self) -> frozenset[tuple[int, str]]:
        """Those that were set, each by id of its module, and name."""
        return frozenset(self._attributes)

    def undo(self) -> bool:
        """Make modules what they were. Whether they are, and arguments as well."""
        for attribute in reversed(self._attributes.values()):
            now = _before(attribute.module, attribute.name)
            if now.table is not None and now.table is not attribute.table:
                del now.table[attribute.name]
            if attribute.table is not None:
                attribute.table[attribute.name] = attribute.value
        self._attributes.clear()
        undone = [container.put_back() for container in self._containers]
        return all(undone) and not self.lasts and are_unchanged(self._arguments)


def is_dense(x: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor whose content can be copied and compared."""
    if not isinstance(x, torch.Tensor) or is_lazy(x) or x.is_inference() or x.is_meta:
        return False
    return x.layout is torch.strided and not x.is_nested


class ModuleState:
    """A picture of what modules hold, to be compared after some code has run.

    before = ModuleState(model.modules())
    model(x)
    before.first_change()        # "Model.h is set", "" where nothing was changed
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.modules = list(modules)
        self._attributes = [_attributes(m) for m in self.modules]
        self._containers = Container.of(containers_of(self.modules))
        tensors = [(m, name, x) for m in self.modules for name, x in _attributes(m).items() if is_dense(x)]
        if sum(x.nbytes for _, _, x in tensors) > MOST_COPIED:
            tensors = [item for item in tensors if not isinstance(item[2], torch.nn.Parameter)]
        self._contents = [(m, name, x, x._version, x.detach().clone()) for m, name, x in tensors]

    def written_unseen(self) -> str:
        """The first tensor that was written to in a way that torch does not count, so that a minibatch that begins anew
        would do it twice: through `.data`, or as numpy's array. "" where there is none."""
        for module, name, x, version, content in self._contents:
            same = x.shape != content.shape or ((x == content) | (x != x)).all()  # NaN equals nothing
            if x._version == version and not same:
                return (
                    f"{type(module).__name__}.{name} is written to through .data, which torch does not count"
                )
        return ""

    def first_change(self) -> str:
        """The first change, "" where there is none."""
        for module, before in zip(self.modules, self._attributes, strict=True):
            now = _attributes(module)
            for name in (*now, *before):
                if now.get(name, _ABSENT) is not before.get(name, _ABSENT):
                    return f"{type(module).__name__}.{name} is set"
        for module, name, x, version, _ in self._contents:
            # An instance that waits may be left while others write to it.
            if x._version != version and name in module.__dict__:
                return f"{type(module).__name__}.{name} is written to"
        return _first_changed(self._containers)


def _first_changed(containers: Iterable[Container]) -> str:
    changed = next((c for c in containers if c.is_changed()), None)
    return "" if changed is None else f"{type(changed.module).__name__}.{changed.name} is changed"


def _attributes(module: torch.nn.Module) -> dict[str, object]:
    """All that a module holds by name."""
    state = module.__dict__
    attributes = {name: x for name, x in state.items() if name not in _TORCHS_OWN or name == "training"}
    for table in TABLES:
        attributes.update(state.get(table, {}))
    return attributes
