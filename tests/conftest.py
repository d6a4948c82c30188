"""Settings of the whole suite: threads, seeds, what is skipped and why, where the real data is."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.fx.experimental.proxy_tensor
from hypothesis import HealthCheck, settings

from fxbatch import LoopWarning
from fxbatch.runtime.strategy import AdaptiveSwitch
from tests.data_sample import sample

# Test workers may inherit a narrow terminal's width; what a command prints into a pipe must not depend on it.
os.environ.pop("COLUMNS", None)
# Which library multiplies is measured once a machine; a test must not depend on how busy that was.
os.environ.setdefault("FXBATCH_PRODUCTS", "own")
# Not what is tested, and longer than what is: Inductor's trial programs and worker processes.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

_WHOLE = "FXBATCH_WHOLE_DATA"  # where the real data is, in full
_VERSIONS = 4  # of the code that builds graphs, whose graphs are kept

# Random programs take as long as they take; a deadline an example would only test the machine's load.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes")


def pytest_configure(config: pytest.Config) -> None:
    """What one test has built, all workers find, and the next run; and of real data they find the first records.

    Graphs are found by the content of their bodies and of the code that builds them (`codegen/built.py`), in a folder
    of this checkout; `make clean` takes it away. Reading a whole treebank takes longer than most tests.
    """
    if "FXBATCH_CACHE" not in os.environ:
        folder = config.rootpath / "build" / "graphs"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)[:-_VERSIONS]:
            shutil.rmtree(old, ignore_errors=True)
        os.environ["FXBATCH_CACHE"] = str(folder)  # workers inherit it
        config.add_cleanup(lambda: os.environ.pop("FXBATCH_CACHE", None))
    whole = os.environ.get("FXBATCH_DATA", "")
    if whole and Path(whole).is_dir() and _WHOLE not in os.environ:
        folder = Path(tempfile.mkdtemp(prefix="fxbatch-data-"))
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        sample(Path(whole), folder)
        os.environ.update({_WHOLE: whole, "FXBATCH_DATA": str(folder)})
        config.add_cleanup(lambda: os.environ.update({"FXBATCH_DATA": os.environ.pop(_WHOLE)}))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name == "trust")  # faults are injected last
    slow = pytest.mark.skip(reason="takes minutes; run with --slow")
    gpu = pytest.mark.skip(reason="no CUDA device here")
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(slow)
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(gpu)


def pytest_collection_finish() -> None:
    """What is imported by now stays (the first step would import proxy_tensor): full collections go without it."""
    _keep_what_is_imported()


def _keep_what_is_imported() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _imports_are_not_looked_at_again() -> Iterator[None]:
    """A test that imported torch._dynamo, say, would make each collection of those after it look at all of that."""
    before = len(sys.modules)
    yield
    if len(sys.modules) > before + 200:
        _keep_what_is_imported()


@pytest.fixture(autouse=True, scope="module")
def _nor_what_other_tests_left() -> None:
    """Caches of thousands of tests would make a full collection, which tests of faults ask for, take two seconds."""
    _keep_what_is_imported()


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Each test starts with the same random state, whatever ran before it. Where there is no GPU, `torch.manual_seed`
    would format the stack for each kind of device, and keep it until there is one."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _always_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests look at batching, on minibatches too small to gain by it; test_strategy.py at the choice."""
    monkeypatch.setattr(AdaptiveSwitch, "on", False)


@pytest.fixture
def as_users_have_it(_always_batched: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The choice is on, as by default, and what it says is no error."""
    monkeypatch.setattr(AdaptiveSwitch, "on", True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LoopWarning)
        yield


_UNPATCHED = torch.nn.Module.__call__, torch.tensor, torch.nn.functional.handle_torch_function


@pytest.fixture(autouse=True)
def _nothing_stays_patched() -> Iterator[None]:
    """A test that leaves torch patched would break others of its process, far from where it failed itself."""
    yield
    now = torch.nn.Module.__call__, torch.tensor, torch.nn.functional.handle_torch_function
    if any(a is not b for a, b in zip(now, _UNPATCHED, strict=True)):
        pytest.fail(f"torch is still patched after this test; threads: {threading.enumerate()}")


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of the first records of real data (`data_sample.py`); tests that need it skip where there is none."""
    return _folder("FXBATCH_DATA")


@pytest.fixture(scope="session")
def whole_data() -> Path:
    """The folder of real data in full."""
    return _folder(_WHOLE)


def _folder(variable: str) -> Path:
    folder = os.environ.get(variable, "")
    if not folder or not Path(folder).is_dir():
        pytest.skip("no real data: FXBATCH_DATA names no folder")
    return Path(folder)
