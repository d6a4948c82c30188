"""The machine and the versions that a run was made with, as data that goes into its JSON.

describe_machine(torch.device("cpu"), threads=2)["processor"]      # 'AMD EPYC 7763'
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "numpy", "networkx", "greenlet", "matplotlib")


def describe_machine(device: torch.device, *, threads: int) -> dict[str, Any]:
    """Processor, cores, memory, threads, device, versions, the code's commit and the load when it began."""
    machine: dict[str, Any] = {
        "processor": processor_name(),
        "cores": os.cpu_count() or 1,
        "memory_bytes": total_memory(),
        "system": platform.system(),
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "threads": threads,
        "interop_threads": torch.get_num_interop_threads(),
        "blas": "mkl" if torch.backends.mkl.is_available() else "other",
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "device": str(device),
        "load_average": load_average(),
        "commit": commit(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine["gpu"] = properties.name
        machine["gpu_memory_bytes"] = properties.total_memory
        machine["cuda"] = torch.version.cuda
        machine["tf32"] = torch.get_float32_matmul_precision() != "highest"
    return machine


def processor_name() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def total_memory() -> int:
    """Bytes of main memory, 0 where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def load_average() -> list[float]:
    """The load averages of 1, 5 and 15 minutes: what else the machine was doing. Empty where unknown."""
    try:
        return [round(x, 2) for x in os.getloadavg()]
    except (AttributeError, OSError):
        return []


def package_version(name: str) -> str:
    """The version of an installed package, "" where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def commit() -> str:
    """The commit of the checkout, with `+` where files differ from it; "" outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
        )
        changed = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True, text=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if found.returncode:
        return ""
    return found.stdout.strip() + ("+" if changed.stdout.strip() else "")


def resident_bytes() -> int:
    """Bytes of this process in main memory now; 0 where the system does not tell."""
    statm = Path("/proc/self/statm")
    if not statm.is_file():
        return 0
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
