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
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import Status


@dataclass(frozen=True, slots=True)
class Level:
    """What can follow `path`: words (subcommands, choices of positionals), options, choices of options."""

    path: tuple[str, ...]
    words: tuple[tuple[str, str], ...]  # (word, help)
    options: tuple[tuple[str, str, tuple[str, ...], bool], ...]  # (option, help, choices, takes a value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to write for")


def run(options: argparse.Namespace) -> int:
    main = importlib.import_module(
        ".main", __package__
    )  # late: main imports the registry that lists this file
    levels = list(walk(main.build_parser(None), ()))
    print({"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[options.shell](levels))
    return Status.OK


def walk(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Iterator[Level]:
    """The levels of a parser and its subparsers, outermost first."""
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
            options += [(name, summary, choices, takes) for name in action.option_strings]
        else:
            words += [(choice, summary) for choice in choices]
    yield Level(path, tuple(words), tuple(options))
    for name, child in children.items():
        yield from walk(child, (*path, name))


def _plain(text: str) -> str:
    return " ".join(text.replace("%%", "%").split()).replace("'", "").replace('"', "").replace("`", "")


def bash_script(levels: list[Level]) -> str:
    """A bash function that finds the deepest known path before the cursor and completes there."""
    cases, choices = [], []
    for level in levels:
        key = " ".join(level.path)
        candidates = [w for w, _ in level.words] + [o for o, *_ in level.options]
        cases.append(f"    '{key}') words='{' '.join(candidates)}' ;;")
        for option, _, values, _takes in level.options:
            if values:
                choices.append(f"    '{key}:{option}') values='{' '.join(values)}' ;;")
    paths = " ".join(f"'{' '.join(level.path)}'" for level in levels if level.path)
    return f"""\
# bash completion for fxbatch; made by `fxbatch completion bash`
_fxbatch() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
  local path='' word candidate words='' values='' known=({paths})
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    for candidate in "${{known[@]}}"; do
      if [[ "$candidate" == "${{path:+$path }}$word" ]]; then path="$candidate"; break; fi
    done
  done
  case "$path:$previous" in
{chr(10).join(choices) or "    *) ;;"}
  esac
  if [[ -n "$values" ]]; then
    COMPREPLY=($(compgen -W "$values" -- "$current")); return
  fi
  case "$path" in
{chr(10).join(cases)}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
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
    ]
    for level in levels:
        at = f"__fxbatch_at {' '.join(level.path)}".strip()
        for word, summary in level.words:
            lines.append(f"complete -c fxbatch -f -n '{at}' -a '{word}' -d '{summary}'")
        for option, summary, values, takes in level.options:
            name = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            value = f" -x -a '{' '.join(values)}'" if values else " -r" if takes else ""
            inside = f"__fish_seen_subcommand_from {level.path[0]}" if level.path else at
            lines.append(f"complete -c fxbatch -n '{inside}' {name}{value} -d '{summary}'")
    return "\n".join(lines)
