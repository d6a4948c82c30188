"""Find the data sets of the examples, and download the treebank of the demo.

examples:
  fxbatch data list                    where each data set was found
  fxbatch data where sst               its folder, for scripts (status 3: none)
  fxbatch data get sst                 download it into your cache folder
  fxbatch data get sst --to data/sst   or into another folder

Folders are searched in this order: --data, FXBATCH_DATA, ./data, your cache
folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from fxbatch.data.download import SST_URL, download_sst
from fxbatch.data.paths import DATA_SETS, cache_folder, locate, search_folders

from .errors import CommandError, Status
from .terminal import notices, output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    listing = actions.add_parser("list", help="the data sets, and where each was found")
    where = actions.add_parser("where", help="print the folder of a data set")
    where.add_argument("name", choices=sorted(DATA_SETS), help="the data set")
    get = actions.add_parser("get", help="download a data set; an interrupted download goes on")
    get.add_argument("name", choices=("sst",), help="the data set")
    get.add_argument("--to", type=Path, metavar="DIR", help="the folder for its files (default: the cache)")
    get.add_argument("--url", default=SST_URL, help="the archive, for a mirror (default: %(default)s)")
    for sub in (listing, where):
        sub.add_argument("--data", type=Path, metavar="DIR", help="look here, and nowhere else")


def run(options: argparse.Namespace) -> int:
    return {"list": _list, "where": _where, "get": _get}[options.action](options)


def _list(options: argparse.Namespace) -> int:
    table = Table("name", "what", "found in", box=None, pad_edge=False)
    missing: dict[str, str] = {}
    for name, data_set in sorted(DATA_SETS.items()):
        folder = None
        if options.data is None or any((options.data / d).is_dir() for d in (name, ".")):
            folder = _locate_quietly(name, options.data)
        table.add_row(name, data_set.title, str(folder) if folder else "not found")
        if folder is None:
            missing[name] = data_set.source
    output().print(table)
    for name, source in missing.items():
        notices().print(f"{name}: {source}", style="dim", soft_wrap=True)
    for why, folder in search_folders(options.data):
        notices().print(f"searched: {folder} ({why})", style="dim", soft_wrap=True)
    return Status.OK


def _locate_quietly(name: str, given: Path | None) -> Path | None:
    """Like `locate`, where a folder without the set is no error."""
    if given is None:
        return locate(name)
    found = [
        c
        for c in (given / name, given)
        if all(any((c / f).is_file() for f in names) for names in DATA_SETS[name].files)
    ]
    return found[0] if found else None


def _where(options: argparse.Namespace) -> int:
    folder = locate(options.name, options.data)
    if folder is None:
        raise CommandError(
            f"{options.name} was not found",
            hint="`fxbatch data get sst` downloads the treebank" if options.name == "sst" else "see --help",
            status=Status.DATA,
        )
    print(folder)
    return Status.OK


def _get(options: argparse.Namespace) -> int:
    folder = options.to or cache_folder() / options.name
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=notices()) as progress:
        task = progress.add_task("sst", total=None)
        download_sst(
            folder,
            url=options.url,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    print(folder)
    return Status.OK
