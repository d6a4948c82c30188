"""The options of `@autobatch`, checked once, with errors that list what is known."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, TypedDict, Union, get_args, get_origin, get_type_hints

import torch

from fxbatch.errors import OptionError


class Batching(TypedDict, total=False):
    """The options of `@autobatch` that don't change what a call gives, as type checkers see them."""

    schedule: Literal["lookahead", "agenda", "depth", "fold", "none"]
    mode: Literal["looped", "unrolled"]
    backward: Literal["compiled", "autograd"]
    shared: str | Sequence[str]
    deduplicate: bool | Literal["auto"]
    fuse: bool
    verify: bool
    compile: bool | str | Callable[..., Any]
    compile_options: Mapping[str, Any] | None
    native: bool
    check: int
    check_gradients: bool
    adaptive: bool | Literal["loop"]
    batch_norm: Literal["refuse", "minibatch"]
    plain: bool


class AllOptions(Batching, total=False):
    """All options of `@autobatch`."""

    out: Literal["stack", "list", "nested"]
    return_exceptions: bool


def _values(kind: object) -> tuple[object, ...]:
    """The values of a type, where it has few; () where it has many."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    parts = [_values(x) for x in get_args(kind)] if get_origin(kind) in (UnionType, Union) else []
    return (True, False) if kind is bool else tuple(x for part in parts for x in part) if all(parts) else ()


def _listed(choices: Sequence[object]) -> str:
    *others, last = map(repr, choices)
    return f"{', '.join(others)} or {last}" if True in choices else f"one of {', '.join([*others, last])}"


KINDS: dict[str, Any] = get_type_hints(AllOptions)
CHOICES: dict[str, tuple[object, ...]] = {name: x for name, kind in KINDS.items() if (x := _values(kind))}

_BACKENDS = ("inductor", "aot_eager", "eager", "cudagraphs")  # known without importing torch's registry


@dataclass(frozen=True)
class Options:
    """Options of a decorated callable, checked: `autobatch` says what each is."""

    schedule: str = "lookahead"
    mode: str = "looped"
    backward: str = "compiled"
    out: str = "stack"
    shared: tuple[str, ...] = ()
    deduplicate: bool | str = "auto"
    fuse: bool = True
    return_exceptions: bool = False
    verify: bool = False
    compile: bool | str | Callable[..., object] = False
    # `mode`, `options`, Inductor's configuration by name.
    compile_options: tuple[tuple[str, object], ...] = ()
    native: bool = True
    check: int = 0
    check_gradients: bool = False
    adaptive: bool | str = True
    batch_norm: str = "refuse"
    plain: bool = False

    @property
    def chooses(self) -> bool:
        """Whether the plain loop is one of the strategies: not where options say how batching is to be done."""
        usual = self.mode == "looped" and self.backward == "compiled" and self.schedule == "lookahead"
        plain = self.compile is False and not self.verify and self.batch_norm == "refuse"
        return self.adaptive is True and usual and plain

    @property
    def packs(self) -> bool:
        """Whether tensors of sizes of their own may be packed: not where options say how each call is to run."""
        return self.mode == "looped" and not self.compile and self.schedule not in ("none", "fold")

    @staticmethod
    def of(**chosen: Any) -> Options:
        """Checked options; OptionError names the unknown one and lists the known."""
        names = [f.name for f in dataclasses.fields(Options)]
        for name in chosen:
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                raise OptionError(f"unknown option {name!r}{hint} Known options: {', '.join(names)}")
        if isinstance(chosen.get("shared"), str):
            chosen["shared"] = (chosen["shared"],)
        if "shared" in chosen:
            chosen["shared"] = tuple(chosen["shared"])
        if not isinstance(chosen.get("compile_options", ()), tuple):
            chosen["compile_options"] = _frozen(chosen["compile_options"] or {})
        for name, choices in CHOICES.items():
            value = chosen.get(name, choices[0])
            if not any(value is x or (isinstance(value, str) and value == x) for x in choices):
                raise OptionError(f"{name}={value!r}: takes {_listed(choices)}")
        if "compile" in chosen:
            check_backend(chosen["compile"])
        every = chosen.get("check", 0)
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise OptionError(f"check={every!r}: takes a whole number: one minibatch in so many is compared")
        options = Options(**chosen)
        if options.check_gradients and not options.check:
            raise OptionError(
                "check_gradients=True compares gradients where check=N compares values: give both"
            )
        if options.return_exceptions and options.out != "list":
            raise OptionError('return_exceptions=True needs out="list": a list can hold exceptions')
        return options


def signature() -> inspect.Signature:
    """That of `autobatch`, with all options, their types and defaults."""
    named = [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=f.default or None if type(None) in get_args(KINDS[f.name]) else f.default,
            annotation=AllOptions.__annotations__[f.name].__forward_arg__,
        )
        for f in dataclasses.fields(Options)
    ]
    return inspect.Signature(named)


def deduplication(options: Options) -> list[str]:
    """The pass that merges equal calls, by the option, or none.

    `auto` leaves what is emitted once a structure as it is, and the policies that are there to be compared
    with.
    """
    if options.deduplicate != "auto":
        return ["deduplicate"] if options.deduplicate else []
    once = options.mode == "unrolled" or options.schedule in ("fold", "none")
    return [] if once else ["deduplicate_large"]


def check_backend(backend: object) -> None:
    """Raise OptionError for what is no torch.compile backend; torch is asked about rare names only."""
    if isinstance(backend, bool) or callable(backend) or backend in ("auto", *_BACKENDS):
        return
    backends = torch.compiler.list_backends(exclude_tags=())
    if backend not in backends:
        raise OptionError(
            f"compile={backend!r}: takes True, False, 'auto', a backend, or the name of one: "
            f"{', '.join(map(repr, backends))}"
        )


def _frozen(options: dict[str, object]) -> tuple[tuple[str, object], ...]:
    """A dictionary as a hashable value, dictionaries in it too."""
    return tuple(sorted((k, _frozen(v) if isinstance(v, dict) else v) for k, v in options.items()))
