"""TARGET arguments: `package.module:function` or `path/to/file.py:function`, to (model, instances).

    model, instances = load_target("examples/tree_lstm.py:minibatch", ["trees=8", "hidden=64"])

The function is called with the `--arg key=value` pairs as keyword arguments. Every mistake is a CommandError
that names the target, the argument, or the line in the user's file.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from fxbatch.decorator import InstanceArguments

from .errors import CommandError, Status

# Folders of the package, found without importing it, and of the command.
_PACKAGE = importlib.util.find_spec("fxbatch")
OURS = (
    [Path(p).resolve() for p in (*(_PACKAGE.submodule_search_locations or ()), Path(__file__).parent)]
    if _PACKAGE
    else []
)


def add_target_arguments(parser: argparse._ActionsContainer, *, optional: bool = False) -> None:
    """The arguments `target` and `--arg`, for each command that looks at a model."""
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="?" if optional else None,
        help="file.py:function or package.module:function, which returns (model, instances)",
    )
    parser.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument of the function, as trees=8; may be repeated",
    )


def load_target(target: str, arguments: Sequence[str] = ()) -> tuple[Any, Sequence[Any]]:
    """(model, instances) of a target. Runs the user's module and function."""
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise _no_target(target)
    with users_output():
        module = _load_module(place)
        function = _find_function(module, place, name)
        keywords = parse_arguments(arguments)
        _check_keywords(function, target, keywords)
        return _checked(_call(function, keywords, target), target)


def users_output() -> AbstractContextManager[object]:
    """Within it, what the user's code prints goes to standard error: standard output is for the command's results."""
    return redirect_stdout(sys.stderr)


def _no_target(target: str) -> CommandError:
    """The error of a TARGET without a function: what it is instead, and what could be meant."""
    path, example = Path(target), "for example: examples/tree_lstm.py:minibatch"
    if path.is_dir():
        return CommandError(f"{target} is a directory", hint=f"a target is a function of a file, {example}")
    if path.is_file():
        names = functions_of(path)
        hint = f"{target}:{names[0]}?" if names else example
        return CommandError(f"{target} is a file; a target names a function in it", hint=hint)
    return CommandError(f"target {target!r} is not file.py:function or package.module:function", hint=example)


def functions_of(path: Path) -> list[str]:
    """The public functions of a file that could be a target, `minibatch` first, without running it."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, ValueError, SyntaxError):
        return []
    names = [x.name for x in body if isinstance(x, ast.FunctionDef) and not x.name.startswith("_")]
    return sorted(names, key=lambda name: name != "minibatch")


def parse_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """`["hidden=64", "name=small"]` to `{"hidden": 64, "name": "small"}`; a key given twice is an error."""
    found: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key.isidentifier():
            raise CommandError(f"--arg {argument!r} is not key=value", hint="for example: --arg hidden=64")
        if key in found:
            raise CommandError(f"--arg {key} is given twice")
        try:
            found[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[key] = text
    return found


def _load_module(place: str) -> ModuleType:
    if place.endswith(".py") or os.sep in place:
        return _load_file(Path(place))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
            raise CommandError(
                f"no module {error.name!r}", hint="a file is given as path/to/file.py:function"
            ) from error
        raise _failed(error, f"importing {place}") from error
    except (Exception, SystemExit) as error:
        raise _failed(error, f"importing {place}") from error


def _load_file(path: Path) -> ModuleType:
    if path.is_dir():
        raise CommandError(f"{path} is a directory", hint="a file is given as path/to/file.py:function")
    if not path.is_file():
        raise CommandError(f"no file {str(path)!r}")
    name = path.stem if path.stem.isidentifier() else "target"
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path.resolve()):
        name = f"_fxbatch_target_{name}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise CommandError(f"{str(path)!r} is not a Python file", hint="its name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    sys.path.insert(0, str(path.resolve().parent))  # as `python path/to/file.py` does
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed(error, f"importing {path}") from error
    return module


def _find_function(module: ModuleType, place: str, name: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function
    own = [
        n
        for n, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not n.startswith("_")
    ]
    close = difflib.get_close_matches(name, own, n=1)
    hint = f"did you mean {place}:{close[0]}?" if close else f"it has: {', '.join(own) or 'no functions'}"
    raise CommandError(f"{place} has no function {name!r}", hint=hint)


def _check_keywords(function: Callable[..., Any], target: str, keywords: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some builtins have none
        return
    try:
        signature.bind(**keywords)
    except TypeError as error:
        raise CommandError(
            f"{target}: {error}", hint=f"it takes {signature}; pass arguments by --arg key=value"
        ) from error


def _call(function: Callable[..., Any], keywords: dict[str, Any], target: str) -> Any:
    try:
        return function(**keywords)
    except (Exception, SystemExit) as error:
        raise _failed(error, target) from error


def _checked(result: Any, target: str) -> tuple[Any, Sequence[Any]]:
    if not isinstance(result, tuple) or len(result) < 2:
        raise CommandError(
            f"{target} returned {type(result).__name__}, expected (model, instances)", status=Status.MODEL
        )
    model, *columns = result
    if not callable(model):
        raise CommandError(
            f"{target} returned a model of type {type(model).__name__}, which can't be called",
            status=Status.MODEL,
        )
    columns = [_listed(column, target) for column in columns]
    if len(columns) == 1:
        return model, columns[0]
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise CommandError(
            f"{target} returned lists of {', '.join(map(str, lengths))} instances after the model",
            hint="as for a call of it, one list for each argument, all of one length",
            status=Status.MODEL,
        )
    return model, [InstanceArguments(row) for row in zip(*columns, strict=True)]


def _listed(instances: Any, target: str) -> Sequence[Any]:
    try:
        return instances if isinstance(instances, (list, tuple)) else list(instances)
    except TypeError as error:
        kind = type(instances).__name__
        raise CommandError(
            f"{target} returned instances of type {kind}, expected a list",
            hint="for one instance: return model, [instance]",
            status=Status.MODEL,
        ) from error


def _is_ours(file: Path) -> bool:
    """Whether a file belongs to the package or to the command: no line to send a user to."""
    return any(file.resolve().is_relative_to(folder) for folder in OURS)


def _failed(error: BaseException, doing: str) -> CommandError:
    """The user's code raised: the message with the last line of it that is no library's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and f.filename.endswith(".py")]
    theirs = [f for f in own if not _is_ours(Path(f.filename)) and "importlib" not in f.filename]
    where = f" ({os.path.relpath(theirs[-1].filename)}:{theirs[-1].lineno})" if theirs else ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" ({os.path.relpath(error.filename)}:{error.lineno})"
    text = " ".join(str(error).split())
    return CommandError(
        f"{doing}: {type(error).__name__}{': ' + text if text else ''}{where}",
        hint="--traceback shows where",
        status=Status.MODEL,
    )
