"""Private parts of PyTorch that fxbatch stands on are where `fxbatch/torch_private.py` says, and do what it needs."""

from __future__ import annotations

import ast
import ctypes
import importlib
import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch._dynamo import trace_rules

from fxbatch import torch_private

TREE = ast.parse(Path(torch_private.__file__).read_text(encoding="utf-8"))
IMPORTED = [
    (node.module, alias.name)
    for node in ast.walk(TREE)
    if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch"
    for alias in node.names
]


@pytest.mark.parametrize(("module", "name"), IMPORTED, ids=[f"{m}.{n}" for m, n in IMPORTED])
def test_it_is_where_it_was(module: str, name: str) -> None:
    found = hasattr(importlib.import_module(module), name)
    assert found, (
        f"torch {torch.__version__} has no {module}.{name}: see fxbatch/torch_private.py for what replaces it"
    )


@pytest.mark.parametrize("name", torch_private.__all__)
def test_it_is_exported(name: str) -> None:
    assert hasattr(torch_private, name)


@pytest.mark.skipif(sys.platform != "linux", reason="found by the name that it has on Linux")
def test_the_receiver_of_warnings_is_found() -> None:
    before = torch_private.warning_handler()
    assert before, f"torch {torch.__version__} does not tell who gets a thread's warnings"
    torch_private.set_warning_handler(before)
    assert torch_private.warning_handler() == before


@pytest.mark.skipif(
    sys.platform != "linux" or not torch.backends.mkl.is_available(), reason="MKL's, on Linux"
)
def test_the_threads_of_torchs_library_are_found() -> None:
    if "OpenMP" not in torch.__config__.parallel_info().splitlines()[-1]:
        pytest.skip("torch was built without OpenMP")
    assert all(torch_private.thread_addresses()), (
        f"torch {torch.__version__} shows no GOMP_parallel: native programs run on one thread"
    )


def test_the_product_of_torchs_library_is_found() -> None:
    assert torch_private.product_address(), (
        f"torch {torch.__version__} shows no sgemm_: products run in Python"
    )


def test_who_holds_a_storage_is_counted() -> None:
    tensor = torch.empty(4)
    storage = tensor.untyped_storage()
    assert torch_private.storage_uses(storage) == 2
    view = tensor[1:]
    assert torch_private.storage_uses(storage) == 3
    del tensor, view
    assert torch_private.storage_uses(storage) == 1


def test_the_functions_that_tell_modes_are_found() -> None:
    excluded, keys, grad, dtype = torch_private.mode_addresses()
    assert excluded and keys and grad and dtype, f"torch {torch.__version__} has them under other names"
    no_autocast = ctypes.PYFUNCTYPE(ctypes.c_bool, ctypes.c_uint64)(excluded)
    grad_now = ctypes.PYFUNCTYPE(ctypes.c_bool)(grad)
    dtype_now = ctypes.PYFUNCTYPE(ctypes.c_int8)(dtype)
    assert no_autocast(keys) and grad_now()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not no_autocast(keys)
    with torch.no_grad():
        assert not grad_now()
    before = dtype_now()
    torch.set_default_dtype(torch.float64)
    try:
        assert dtype_now() != before
    finally:
        torch.set_default_dtype(torch.float32)
    assert dtype_now() == before


def test_tracing_with_sizes_fills_no_cache() -> None:
    """The attribute that says so is where it was, and what was traced has a graph all the same."""
    assert torch_private.FakeTensorMode().cache_enabled is True
    graph, env = torch_private.trace_with_sizes(lambda x: (x * 2).sum(0), [torch.randn(3, 2)], [(0,)], {})
    assert [n.op for n in graph.graph.nodes] == ["placeholder", "call_function", "call_function", "output"]
    assert not env.fake_tensor_cache


def test_a_stub_of_a_module_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sys.modules["pandas"] = types.ModuleType("pandas")`, as tests do: Dynamo looks at its __spec__."""
    monkeypatch.setitem(sys.modules, "pandas", types.ModuleType("pandas"))
    listed: list[object] = []

    def lists() -> None:
        listed.append(importlib.util.find_spec("pandas"))

    monkeypatch.setattr(trace_rules, "get_torch_obj_rule_map", lists)
    with pytest.raises(ValueError, match="__spec__"):
        lists()
    torch_private.let_dynamo_read_torch.__wrapped__()
    assert listed == []


def test_a_stub_of_what_dynamo_looks_for_as_it_is_imported_is_no_error() -> None:
    """A process in which a forward's code has put a stub of a package that Dynamo skips."""
    code = """
import sys, types
sys.modules["sklearn"] = types.ModuleType("sklearn")
import torch, fxbatch
assert "torch._dynamo" not in sys.modules
layer = torch.nn.Linear(3, 3)
for adaptive in (True, False):
    batched = fxbatch.autobatch(lambda m, x: torch.tanh(m(x)).sum(), adaptive=adaptive)
    xs = [torch.randn(n, 3) for n in (2, 3, 4)]
    torch.testing.assert_close(batched(layer, xs), torch.stack([torch.tanh(layer(x)).sum() for x in xs]))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
