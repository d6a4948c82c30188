"""What a fresh process imports: no library that it need not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORTED = """
import sys, torch
before = set(sys.modules)
import fxbatch
assert not {"networkx", "rich", "torch._dynamo", "sympy"} & (set(sys.modules) - before), "by importing fxbatch"

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)

    @fxbatch.autobatch
    def forward(self, x):
        return torch.tanh(self.linear(x)).sum(0)

model = Model()
for _ in range(3):
    model([torch.randn(3) for _ in range(2)]).sum().backward()
assert not {"networkx", "rich", "torch._dynamo", "sympy"} & (set(sys.modules) - before), "by running the loop"

batched = fxbatch.autobatch(adaptive=False)(lambda x: torch.tanh(model.linear(x) * torch.tensor(2.0)).sum(0))
batched([torch.randn(3) for _ in range(2)]).sum().backward()
assert "torch._dynamo" not in sys.modules, "by building operations"
assert not hasattr(torch.sin, "__dynamo_disable") and "_dynamo" not in vars(torch)
print("fine")
"""


def test_importing_and_running_the_loop_import_nothing_large() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ran.stdout.split() == ["fine"], ran.stderr[-2000:]


def test_garbage_is_collected_after_the_import_as_before() -> None:
    for on in (True, False):
        code = f"import gc\nif not {on}: gc.disable()\nimport fxbatch\nprint(gc.isenabled())"
        ran = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert ran.stdout.split() == [str(on)], ran.stderr[-2000:]
