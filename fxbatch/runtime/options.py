"""The options of `@autobatch`, checked once, with errors that list what is known."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from fxbatch.errors import OptionError

CHOICES: dict[str, tuple[Any, ...]] = {
    "schedule": ("agenda", "depth", "fold", "lookahead", "best", "none"),
    "mode": ("looped", "unrolled"),
    "backward": ("compiled", "autograd"),
    "out": ("stack", "list", "nested"),
    "memory": ("save", "recompute"),
}


@dataclass(frozen=True)
class Options:
    """Options of a decorated callable.

    schedule: batching policy (`lookahead` is ours: never more steps than `agenda`, see docs/design.md).
    mode: `looped` walks a plan, `unrolled` emits an fx.GraphModule a structure. backward: `compiled` (three
    graphs an operation, one autograd function a minibatch) or `autograd`
    (ordinary autograd, double backward). out: `stack`, `list` or `nested` results. shared: names of
    arguments given once for all instances. memory: what training keeps (`save`) or computes again
    (`recompute`). deduplicate, fuse, split: rewrites before scheduling. return_exceptions: give the exception
    of an instance in its place in the results (with out="list") instead of raising it. verify: check every
    form after every rewrite (slow, for debugging).
    compile: False, True or the name of a torch.compile backend, for operation graphs; compile_options: passed
    through to it.
    """

    schedule: str = "lookahead"
    mode: str = "looped"
    backward: str = "compiled"
    out: str = "stack"
    shared: tuple[str, ...] = ()
    memory: str = "save"
    deduplicate: bool = False
    fuse: bool = True
    split: bool = False
    return_exceptions: bool = False
    verify: bool = False
    compile: bool | str = False
    compile_options: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def of(**given: Any) -> Options:
        """Checked options; OptionError names the unknown one and lists the known."""
        known = [f.name for f in dataclasses.fields(Options)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                raise OptionError(f"unknown option {name!r}{hint} Known options: {', '.join(known)}")
        if isinstance(given.get("shared"), str):
            given["shared"] = (given["shared"],)
        if "shared" in given:
            given["shared"] = tuple(given["shared"])
        if isinstance(given.get("compile_options"), dict):
            given["compile_options"] = tuple(sorted(given["compile_options"].items()))
        for name, choices in CHOICES.items():
            if name in given and given[name] not in choices:
                raise OptionError(f"{name}={given[name]!r}: takes one of {', '.join(map(repr, choices))}")
        for name in ("deduplicate", "fuse", "split", "return_exceptions", "verify"):
            if name in given and not isinstance(given[name], bool):
                raise OptionError(f"{name}={given[name]!r}: takes True or False")
        options = Options(**given)
        if options.return_exceptions and options.out != "list":
            raise OptionError('return_exceptions=True needs out="list": a list can hold exceptions')
        return options
