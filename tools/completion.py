"""Print a script that completes `fxbatch` in bash, zsh or fish.

examples:
  source <(fxbatch completion bash)                      for this shell
  fxbatch completion bash > ~/.local/share/bash-completion/completions/fxbatch
  source <(fxbatch completion zsh)                       after compinit
  fxbatch completion fish > ~/.config/fish/completions/fxbatch.fish

Pressing Tab starts no Python. Print the script again after an update.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from .errors import Status

_NONE: Mapping[str, tuple[str, ...]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Level:
    """The words that can follow `path`: subcommands, choices of positionals and options, options, a TARGET."""

    path: tuple[str, ...]
    words: tuple[tuple[str, str], ...]  # (word, help)
    options: tuple[tuple[str, str, tuple[str, ...], bool], ...]  # (option, help, choices, takes a value)
    target: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to write for")


def run(options: argparse.Namespace) -> int:
    main = importlib.import_module(
        ".main", __package__
    )  # late: main imports the registry that lists this file
    levels = list(walk(main.build_parser(None), (), option_values()))
    print({"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[options.shell](levels))
    return Status.OK


def option_values() -> dict[str, tuple[str, ...]]:
    """By option: the values to complete it with, for options that argparse has no choices for."""
    batching = importlib.import_module("fxbatch.runtime.options")  # late: it imports torch
    values = []
    for field in fields(batching.Options):
        choices = batching.CHOICES.get(field.name, ())
        values += [f"{field.name}={choice}" for choice in choices] or [f"{field.name}="]
    stages = importlib.import_module(".dump", __package__).ALL_STAGES
    return {**dict.fromkeys(("--option", "--a", "--b"), tuple(values)), "--stage": stages}


def walk(
    parser: argparse.ArgumentParser, path: tuple[str, ...], values: Mapping[str, tuple[str, ...]] = _NONE
) -> Iterator[Level]:
    """The levels of a parser and its subparsers, outermost first. values: of options without choices."""
    target = False
    words: list[tuple[str, str]] = []
    options = []
    children: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        summary = _plain(action.help or "")
        choices = tuple(map(str, action.choices)) if action.choices is not None else ()
        if isinstance(action, argparse._SubParsersAction):
            helps = {a.dest: _plain(a.help or "") for a in action._choices_actions}
            words += [(name, helps.get(name, "")) for name in action.choices]
            children.update(action.choices)
        elif action.option_strings:
            takes = action.nargs != 0
            options += [
                (name, summary, choices or values.get(name, ()), takes) for name in action.option_strings
            ]
        else:
            words += [(choice, summary) for choice in choices]
            target |= action.metavar == "TARGET"
    yield Level(path, tuple(words), tuple(options), target)
    for name, child in children.items():
        yield from walk(child, (*path, name), values)


def _plain(text: str) -> str:
    return " ".join(text.replace("%%", "%").split()).replace("'", "").replace('"', "").replace("`", "")


def bash_script(levels: list[Level]) -> str:
    """A bash function that finds the deepest known path before the cursor and completes there.

    bash splits words at `=` and `:`, so the words are those of the line, and of a completion the part behind is given.
    """
    cases, choices, free = [], [], []
    for level in levels:
        key = " ".join(level.path)
        candidates = [w for w, _ in level.words] + [o for o, *_ in level.options]
        cases.append(f"    '{key}') words='{' '.join(candidates)}' ;;")
        for option, _, values, takes in level.options:
            if values:
                choices.append(f"    '{key}:{option}') values='{' '.join(values)}' ;;")
            elif takes:
                free.append(f"'{key}:{option}'")
    if free:
        choices.append(f"    {'|'.join(free)}) return ;;")
    paths = " ".join(f"'{' '.join(level.path)}'" for level in levels if level.path)
    targets = "|".join(f"'{' '.join(level.path)}'" for level in levels if level.target)
    return f"""\
# bash completion for fxbatch; made by `fxbatch completion bash`
_fxbatch() {{
  local line="${{COMP_LINE:0:$COMP_POINT}}" current='' previous='' prefix='' count typed
  local path='' word candidate words='' values='' known=({paths})
  set -f; typed=($line); set +f
  count=$((${{#typed[@]}} - 1))
  if [[ "$line" != *[[:space:]] ]]; then
    current="${{typed[$count]}}"; typed=("${{typed[@]:0:$count}}"); count=$((count - 1))
  fi
  previous="${{typed[$count]}}"
  for word in "${{typed[@]:1}}"; do
    for candidate in "${{known[@]}}"; do
      if [[ "$candidate" == "${{path:+$path }}$word" ]]; then path="$candidate"; break; fi
    done
  done
  COMPREPLY=()
  case "$path:$previous" in
{chr(10).join(choices) or "    *) ;;"}
  esac
  case "$path" in
{chr(10).join(cases)}
  esac
  if [[ -n "$values" ]]; then
    words="$values"
    if [[ "$values" == *=* ]]; then compopt -o nospace 2> /dev/null; fi
  elif [[ "$current" == *.py:* ]]; then
    words="$(sed -n "s|^def \\([A-Za-z][A-Za-z0-9_]*\\)(.*|${{current%%:*}}:\\1|p" "${{current%%:*}}" 2> /dev/null)"
  elif [[ "$current" != -* ]]; then
    case "$path" in
      {targets or "'-'"})
        words="$words $(compgen -d -S / -- "$current") $(compgen -f -X '!*.py' -S : -- "$current")"
        compopt -o nospace 2> /dev/null ;;
    esac
  fi
  if [[ "$current" == *[:=]* && "$COMP_WORDBREAKS" == *[:=]* ]]; then
    prefix="${{current%"${{current##*[:=]}}"}}"
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  COMPREPLY=("${{COMPREPLY[@]#"$prefix"}}")
}}
complete -o default -F _fxbatch fxbatch"""


def zsh_script(levels: list[Level]) -> str:
    """zsh, through its bash emulation: one description of the command serves both."""
    return f"""\
#compdef fxbatch
autoload -U +X bashcompinit && bashcompinit
{bash_script(levels)}"""


def fish_script(levels: list[Level]) -> str:
    """One `complete` line a word and option, with their help."""
    lines = [
        "# fish completion for fxbatch; made by `fxbatch completion fish`",
        "function __fxbatch_at",
        "    set -l words (commandline -opc | string match -v -- '-*')",
        '    test "$words[2..]" = "$argv"',
        "end",
        "function __fxbatch_targets",
        "    set -l file (commandline -ct | string replace -r ':.*' '')",
        "    if string match -q '*.py:*' -- (commandline -ct)",
        "        sed -n 's/^def \\([A-Za-z][A-Za-z0-9_]*\\)(.*/\\1/p' $file 2> /dev/null \\",
        "            | string replace -r '^' $file:",
        "    else",
        "        __fish_complete_suffix .py | string replace -r '\\.py$' '.py:'",
        "    end",
        "end",
    ]
    for level in levels:
        at = f"__fxbatch_at {' '.join(level.path)}".strip()
        inside = f"__fish_seen_subcommand_from {level.path[0]}" if level.path else at
        for word, summary in level.words:
            lines.append(f"complete -c fxbatch -f -n '{at}' -a '{word}' -d '{summary}'")
        for option, summary, values, takes in level.options:
            name = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            value = f" -x -a '{' '.join(values)}'" if values else " -r" if takes else ""
            lines.append(f"complete -c fxbatch -n '{inside}' {name}{value} -d '{summary}'")
        if level.target:
            lines.append(f"complete -c fxbatch -f -n '{inside}' -a '(__fxbatch_targets)' -d TARGET")
    return "\n".join(lines)
