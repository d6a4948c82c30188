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
large = {"networkx", "rich", "torch._dynamo", "sympy", "statistics"}
assert not large & (set(sys.modules) - before), "by importing fxbatch"

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)

    @fxbatch.autobatch(adaptive="loop")
    def forward(self, x):
        return torch.tanh(self.linear(x)).sum(0)

model = Model()
for _ in range(3):
    model([torch.randn(3) for _ in range(2)]).sum().backward()
assert not {"networkx", "rich", "torch._dynamo", "sympy"} & (set(sys.modules) - before), "by running the loop"

F = torch.nn.functional
embed, cell, norm = torch.nn.Embedding(9, 4), torch.nn.LSTMCell(4, 4), torch.nn.LayerNorm(4)
drop = torch.nn.Dropout(0.5)

def loss(x):
    h, c = cell(drop(norm(model.linear(x)))[None], (embed(torch.tensor([2])), torch.zeros(1, 4)))
    i, o = torch.cat([h, c], -1).view(2, 4).chunk(2, -1)
    y = torch.where(i > 0, torch.softmax(i @ o.t(), -1), x[:2].expand(2, 2)).clamp(min=0.1).log()
    z = torch.stack([y[0], y[1, [1, 0]]]).double().mean(0).float().index_select(0, torch.tensor([1, 0]))
    return F.cross_entropy(z * torch.tensor(2.0), torch.tensor(1)) + F.gelu(h).pow(2).sum().sqrt()

batched = fxbatch.autobatch(adaptive=False)(loss)
batched([torch.randn(3) for _ in range(2)]).sum().backward()
assert not {"networkx", "rich", "torch._inductor.graph"} & set(sys.modules), "by building operations"

packed = fxbatch.autobatch(adaptive=False)(lambda rows: torch.tanh(model.linear(rows)).sum(0))
packed([torch.randn(n, 3) for n in range(2, 9)]).sum().backward()
not_needed = {"networkx", "torch.export._trace", "torch._inductor.codecache", "torch._functorch.partitioners"}
assert "sympy" in sys.modules and not not_needed & set(sys.modules), "by tracing with symbols for sizes"
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
