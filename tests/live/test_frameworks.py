"""The recipes for FastAPI, LitServe and Ray Serve answer requests as the loop does, where these are installed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS, ROOT, python_blocks

WORD = 3
HEAD = "import torch\nfrom torch import nn\n\nimport fxbatch\n\ntorch.manual_seed(0)\n"
ALONE = f"""
with torch.no_grad():
    print("ALONE", Speller.forward.__wrapped__(speller, torch.tensor({WORD}), 20), flush=True)
"""


def block(begins: str) -> str:
    """The block of the page of recipes that has this in it."""
    return next(source for _, source in python_blocks(DOCS / "recipes.md") if begins in source)


def module(recipe: str) -> str:
    """The speller of the page, and a recipe."""
    speller = block("class Speller").partition("async def main")[0]
    return HEAD + speller + block(recipe)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def answer(url: str, body: bytes | None = None) -> str:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return str(response.read().decode())


@contextmanager
def running(folder: Path, files: dict[str, str], *command: str) -> Iterator[subprocess.Popen[str]]:
    """A process of Python that runs these files."""
    for name, text in files.items():
        (folder / name).write_text(text)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{folder}"}
    arguments = [sys.executable, *command]
    with subprocess.Popen(
        arguments, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


def alone(process: subprocess.Popen[str]) -> Any:
    """What the loop gives, as the process prints it."""
    assert process.stdout is not None
    return json.loads(next(x for x in process.stdout if x.startswith("ALONE"))[6:])


def first(call: Callable[[], str]) -> str:
    """The first answer of a server that begins."""
    for _ in range(600):
        try:
            return call()
        except OSError:
            time.sleep(0.1)
    return call()


def test_fastapi(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="FastAPI is not installed")
    pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    port = free_port()
    files = {"app.py": module("from fastapi") + ALONE}
    with running(tmp_path, files, "-m", "uvicorn", "app:app", "--port", str(port)) as process:
        wanted, url = alone(process), f"http://127.0.0.1:{port}"
        assert json.loads(first(lambda: answer(f"{url}/spell/{WORD}"))) == wanted
        assert "fxbatch_done_total 1.0" in answer(f"{url}/metrics")


def test_litserve(tmp_path: Path) -> None:
    pytest.importorskip("litserve", reason="LitServe is not installed")
    port = free_port()
    main = f'\nif __name__ == "__main__":\n    lit_server.run(port={port}, generate_client_file=False)\n'
    files = {"app.py": module("import litserve") + main, "alone.py": "from app import *\n" + ALONE}
    with running(tmp_path, files, "alone.py") as process:
        wanted = alone(process)
    with running(tmp_path, files, "app.py"):
        assert (
            json.loads(first(lambda: answer(f"http://127.0.0.1:{port}/predict", str(WORD).encode())))
            == wanted
        )


def test_ray(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    port = free_port()
    drive = f"""
import ray
from ray import serve

from app import *

ray.init(num_cpus=2, include_dashboard=False)
serve.start(http_options={{"port": {port}}})
serve.run(app)
{ALONE}
import time
time.sleep(600)
"""
    with running(
        tmp_path, {"app.py": module("from ray import serve"), "drive.py": drive}, "drive.py"
    ) as process:
        assert json.loads(first(lambda: answer(f"http://127.0.0.1:{port}/?word={WORD}"))) == alone(process)
