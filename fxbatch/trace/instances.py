"""What an instance leaves on modules is its own while others wait: each sees what the loop would show it.

In: the first instance that waits. Out: at each switch, the attributes of modules as the instance that goes on would
find them, and in the end as the loop leaves them.

    self.h = self.l(x)
    if self.h.sum() > 0: ...      # others run here: each has an `h` of its own
    self.n += 1                   # waits until all earlier instances are done, then counts on from theirs

Why so, and not an error where values of two instances meet: state in `self` is ordinary Python (an LSTM's `self.h`, a
counter, a log), it batches as well as without, and what one instance leaves to the next may be meant. The rule is the
loop's own: an attribute that an instance has not set itself is the one that the instances before it leave, so whoever
reads it before those are done waits for its turn. Which attributes these are is read from the code of the modules'
classes (trace/lasting.py) when the first instance waits; those that are set otherwise are seen as they are set.

What can't be switched is not mixed either: an instance that holds what all share (a lock or another manager of a
`with` that is none of torch's modes, a default dtype, sys.stdout, a global that the code changes) is not left: what it
asks for runs at once. Minibatches in which nobody waits pay for none of this.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from fxbatch.errors import TraceError
from fxbatch.trace.lasting import changes_of, holds_what_is_shared
from fxbatch.trace.state import current_recorder
from fxbatch.trace.user_line import at_line

Settings = tuple[Any, ...]
_ABSENT: Any = object()  # an attribute that a module does not have
_CONTAINERS = (list, dict, set, deque, bytearray)
_FEW = 64  # containers of more items are compared by their length alone
_plain_getattr = torch.nn.Module.__getattr__
_OWN_TABLES = ("_parameters", "_buffers", "_modules")


class _Attribute:
    """One attribute of one module, as the instances have it."""

    __slots__ = ("hidden", "module", "name", "own", "settled", "shown")

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self.own: dict[int, Any] = {}  # what instances have set that are not all done before
        self.settled = self.shown = module.__dict__.get(
            name, _ABSENT
        )  # as those that are done leave it; as it is now
        self.hidden = False  # absent now since earlier instances may still set it

    def put(self, x: Any) -> None:
        if x is _ABSENT:
            self.module.__dict__.pop(self.name, None)
        else:
            self.module.__dict__[self.name] = x
        self.shown = x


class Instances:
    """The attributes that instances of one recording set on modules, since the first of them waited."""

    def __init__(
        self,
        roots: Iterable[torch.nn.Module],
        set_before: Mapping[tuple[int, str], torch.nn.Module],
        forget: Callable[[], None],
        fn: Callable[..., Any],
        count: int,
        started: int,
        settings: Settings,
    ) -> None:
        """set_before: what was set until now, by id and name. forget: is called where what is known of the modules may
        not be so any more. settings: when the minibatch began."""
        modules = {id(m): m for r in roots for m in r.modules()}
        changes = changes_of([fn], list(modules.values()))
        self.forget = forget
        self.names = changes.names
        self.shared = changes.shared
        self.done = bytearray(count)
        self.done[:started] = b"\1" * started
        self.settled = started  # all before this one are done
        self.begun = started + 1
        self.turn: Callable[[], None] | None = None  # parks the instance until all earlier ones are done
        self.attributes: dict[tuple[int, str], _Attribute] = {}
        self.order = {key: tuple(m.__dict__) for key, m in modules.items()}
        self.modules = modules
        self.settings = self.entered = settings  # when the minibatch began, and when the instance went on
        for key, m in modules.items():
            for name in m.__dict__:
                if name in self.names and name not in _OWN_TABLES:
                    self.attributes[key, name] = _Attribute(m, name)
        for (key, name), m in set_before.items():
            self.modules.setdefault(key, m)
            self.order.setdefault(key, tuple(m.__dict__))
            self.attributes.setdefault((key, name), _Attribute(m, name))
        self.watched = {
            (key, name): _content(x)
            for key, m in modules.items()
            if not type(m).__module__.startswith("torch.")
            for name, x in m.__dict__.items()
            if isinstance(x, _CONTAINERS) and not name.startswith("_") and (key, name) not in self.attributes
        }

    # Switches

    def enter(self, instance: int) -> None:
        """Show what this instance finds."""
        turn = self.settled >= instance
        self.entered = settings_now()
        for a in self.attributes.values():
            x = a.own.get(instance, a.settled if turn else _ABSENT)
            a.hidden = not turn and instance not in a.own
            self._show(a, x)

    def leave(self, instance: int) -> None:
        """Take what this instance has set, and show what those that are done leave."""
        for a in self.attributes.values():
            now = a.module.__dict__.get(a.name, _ABSENT)
            if now is not a.shown:
                a.own[instance] = now
            a.hidden = False
            self._show(a, a.settled)
        self._refuse_changed_containers(instance)

    def end(self, instance: int) -> None:
        """This instance is done."""
        self.leave(instance)
        self._refuse_changed_settings(instance)
        self.done[instance] = 1
        while self.settled < len(self.done) and self.done[self.settled]:
            for a in self.attributes.values():
                x = a.own.pop(self.settled, a.settled)
                if x is not a.settled:
                    a.settled = x
                    self._show(a, x)
            self.settled += 1

    def begin(self, instance: int) -> None:
        """This instance begins."""
        self.begun = max(self.begun, instance + 1)
        self.enter(instance)

    def close(self) -> None:
        """After the last instance: modules list their attributes in the order in which they did."""
        for key in dict.fromkeys(key for key, _ in self.attributes):
            state, order = self.modules[key].__dict__, self.order.get(key, ())
            for name in (*order, *(n for n in tuple(state) if n not in order)):
                if name in state:
                    state[name] = state.pop(name)

    def _show(self, a: _Attribute, x: Any) -> None:
        if x is not a.module.__dict__.get(a.name, _ABSENT):
            a.put(x)
            if a.name == "training" or isinstance(x, torch.nn.Module):
                self.forget()
        a.shown = x

    # What instances do

    def why_stay(self) -> str:
        """Why the instance that asks now can't be left, as it holds or changes what all share; "" where it can."""
        if self.shared:
            return f"the code changes {self.shared}, which all instances share"
        if self.settings != settings_now():
            return "a setting of the process is changed"
        if holds_what_is_shared(sys._getframe(1)):
            return "it is inside a `with`, or holds a lock, that all instances may share"
        return ""

    def read(self, module: torch.nn.Module, name: str, instance: int) -> None:
        """A module's attribute is not there: where earlier instances may still set it, wait until they are done."""
        a = self.attributes.get((id(module), name))
        if a is None:
            if name not in self.names or self.settled >= instance:
                return
            a = self._new(module, name)
            a.hidden = True
        if a.hidden and self.settled < instance:
            assert self.turn is not None
            self.turn()

    def set(self, module: torch.nn.Module, name: str, instance: int) -> None:
        """A module's attribute is about to be set, or taken away."""
        key = (id(module), name)
        if any(name in module.__dict__.get(table, ()) for table in _OWN_TABLES):
            if self._others(instance):
                raise self._mixed(module, name)
            return
        if key in self.attributes:
            return
        if name in module.__dict__ and instance + 1 < self.begun:
            raise self._mixed(module, name)
        self._new(module, name)

    def _new(self, module: torch.nn.Module, name: str) -> _Attribute:
        self.modules.setdefault(id(module), module)
        self.order.setdefault(id(module), tuple(module.__dict__))
        a = self.attributes[id(module), name] = _Attribute(module, name)
        return a

    def _others(self, instance: int) -> bool:
        """Whether others have begun and are not done."""
        return any(not self.done[i] for i in range(self.settled, self.begun) if i != instance)

    def _mixed(self, module: torch.nn.Module, name: str) -> TraceError:
        return TraceError(
            f"{type(module).__name__}.{name} is changed while other instances wait for values, which may have read it "
            f"already: set it in a method of a module by its name, keep it in a local variable, or give it back as a "
            f"result{at_line()}"
        )

    def _refuse_changed_containers(self, instance: int) -> None:
        for (key, name), before in self.watched.items():
            module = self.modules[key]
            now = _content(module.__dict__.get(name))
            if now != before:
                if self._others(instance):
                    raise self._mixed(module, name)
                self.attributes.setdefault((key, name), _Attribute(module, name))
        for changed in [k for k in self.watched if k in self.attributes]:
            del self.watched[changed]

    def _refuse_changed_settings(self, instance: int) -> None:
        now = settings_now()
        if now != self.entered and self._others(instance):
            what = next(name for name, a, b in zip(_SETTINGS, self.entered, now, strict=True) if a != b)
            raise TraceError(
                f"instance {instance} leaves {what} changed while other instances wait for values, which have begun "
                "without: change it back, or before the call"
            )


_SETTINGS = ("the default dtype", "sys.stdout", "sys.stderr", "deterministic algorithms")


def settings_now() -> Settings:
    """What a process has once, and a forward may change without a `with`."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return torch.get_default_dtype(), id(sys.stdout), id(sys.stderr), deterministic


def _content(x: Any) -> Any:
    """What tells whether a container was changed."""
    if not isinstance(x, _CONTAINERS):
        return id(x)
    items: Sequence[Any] = () if len(x) > _FEW else [*x.items()] if isinstance(x, dict) else [*x]
    flat = [y for item in items for y in (item if isinstance(x, dict) else (item,))]
    return id(x), len(x), [y if type(y) in (int, float, str, bool) else id(y) for y in flat]


def traced_getattr(self: torch.nn.Module, name: str) -> Any:
    """`nn.Module.__getattr__` while instances of some thread's recording wait."""
    state = self.__dict__
    if not any(name in state.get(table, ()) for table in _OWN_TABLES):
        recorder = current_recorder()
        if recorder is not None and recorder.waiting is not None:
            recorder.waiting.read(self, name, recorder.running)
            if name in state:
                return state[name]
    return _plain_getattr(self, name)
