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


COLLECTED = """
import gc, os, torch
for on in (True, False):
    if not os.fork():
        gc.enable() if on else gc.disable()
        import fxbatch
        os._exit(gc.isenabled() is not on)
    assert os.wait()[1] == 0, "garbage is collected after the import as before"
"""


def test_importing_and_running_the_loop_import_nothing_large_and_leave_collections_as_they_were() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", COLLECTED + IMPORTED], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ran.stdout.split() == ["fine"], ran.stderr[-2000:]
