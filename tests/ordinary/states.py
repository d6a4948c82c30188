"""Models with state, and what is done to them between calls, as text: each twin has globals and classes of its own.

A case is `= its name`, the source that makes `m`, and `> what is run` before each further call. The twins are called
with the same instances, one batched and one in the undecorated loop, and must give the same each time; `seen()`, where
a case defines it, is what else must be the same. A case under MAY_REFUSE may also be refused by a FxbatchError.
"""

from __future__ import annotations

PRELUDE = """
import collections, contextlib, contextvars, copy, functools, io, itertools, math, os, random, sys, threading, types
import numpy as np, torch, fxbatch
from torch import nn
from torch.nn import functional as F
L = lambda: nn.Linear(4, 4)
def model(f, opts={}, **parts):
    made = type("Model", (nn.Module,), {"forward": fxbatch.autobatch(**{"out": "list", **opts})(f)})()
    for name, part in parts.items():
        setattr(made, name, part)
    return made
class Sub(nn.Module):
    def __init__(self, f, **parts):
        super().__init__()
        self.f = [f]
        self.l = L()
        for name, part in parts.items():
            setattr(self, name, part)
    def forward(self, *args, **kwargs):
        return self.f[0](self, *args, **kwargs)
def sub(f, **parts):  # a class of its own, whose forward is f
    made = type("Own", (nn.Module,), {"forward": f, "gain": 2.0})()
    made.l = L()
    for name, part in parts.items():
        setattr(made, name, part)
    return made
class Config: pass
config = Config()
config.scale, config.deep = 0.5, {"steps": [1, 2]}
through = lambda self, x: self.s(self.l(x))
"""

# A submodule `m.s` whose body reads something, and what is done to that.
READ = """
= own number
sub(lambda s, x: s.l(x) * s.tau, tau=0.5)
> m.s.tau = 2.0
> m.s.tau = 0.5
> m.s.tau = -1
= own text
sub(lambda s, x: getattr(torch, s.act)(s.l(x)), act='tanh')
> m.s.act = 'relu'
= own function
sub(lambda s, x: s.act(s.l(x)), act=torch.tanh)
> m.s.act = torch.relu
> m.s.act = F.gelu
= own partial
sub(lambda s, x: s.act(s.l(x)), act=functools.partial(F.leaky_relu, negative_slope=0.5))
> m.s.act = functools.partial(F.leaky_relu, negative_slope=-0.5)
= own list
sub(lambda s, x: s.l(x) * s.w[0], w=[1.0, 2.0])
> m.s.w[0] = 3.0
> m.s.w = [4.0]
= own dictionary
sub(lambda s, x: s.l(x) * s.w['a'], w={'a': 1.0})
> m.s.w['a'] = 3.0
= own array
sub(lambda s, x: s.l(x) * float(s.w[0]), w=np.ones(2))
> m.s.w[0] = 3.0
= own set
sub(lambda s, x: s.l(x) * (2 if 'a' in s.w else 3), w={'a'})
> m.s.w.clear()
= own object
sub(lambda s, x: s.l(x) * s.config.scale, config=config)
> config.scale = 2.0
= own object within
sub(lambda s, x: s.l(x) * s.config.deep['steps'][0], config=config)
> config.deep['steps'][0] = 5
= another object
sub(lambda s, x: s.l(x) * s.config.scale, config=config)
> m.s.config = types.SimpleNamespace(scale=3.0)
> m.s.config = config
= global object
sub(lambda s, x: s.l(x) * config.scale)
> config.scale = 2.0
> config.scale = 0.5
= global number
sub(lambda s, x: s.l(x) * GAIN)
> GAIN = 2.0
> GAIN = 0.5
= global function
sub(lambda s, x: act(s.l(x)))
> act = torch.relu
= global of a function
sub(lambda s, x: gained(s.l(x)))
> GAIN = 2.0
= class attribute
sub(lambda s, x: s.l(x) * type(s).gain)
> type(m.s).gain = 3.0
> type(m.s).gain = 1.0
= default argument
sub(scaled)
> scaled.__defaults__ = (3.0,)
= default argument by name
sub(lambda s, x, *, gain=2.0: s.l(x) * gain)
> type(m.s).forward.__kwdefaults__ = {'gain': 3.0}
= default argument of a function
sub(lambda s, x: twofold(s.l(x)))
> twofold.__defaults__ = (3.0,)
= code reloaded
sub(lambda s, x: gained(s.l(x)))
> gained.__code__ = (lambda y: y * GAIN * 3).__code__
= closure
sub(closed()[0])
> closed()[1](3.0)
= property
Prop()
> m.s.base = 3.0
= environment
sub(lambda s, x: s.l(x) * float(os.environ.get(KEY, '1')))
> os.environ[KEY] = '3'
> os.environ.pop(KEY, None)
= dropout
nn.Dropout(0.)
> m.s.p = 1.0
> m.s.p = 0.0
> m.eval(); m.s.p = 1.0
= slope
nn.LeakyReLU(0.1)
> m.s.negative_slope = 0.9
> m.s.negative_slope = 0.1
= eps
nn.LayerNorm(4)
> m.s.eps = 1.0
= dimension
nn.Softmax(dim=-1)
> m.s.dim = 0
= clamp
nn.Hardtanh(-1, 1)
> m.s.max_val = 0.1
= inside a sequence
nn.Sequential(L(), nn.LeakyReLU(0.1))
> m.s[1].negative_slope = 0.9
= module exchanged
sub(lambda s, x: s.act(s.l(x)), act=nn.ReLU())
> m.s.act = nn.Tanh()
> m.s.act = nn.ReLU()
= module exchanged in a sequence
nn.Sequential(L(), nn.ReLU())
> m.s[1] = nn.Tanh()
> m.s.append(L())
= module exchanged by name
nn.ReLU()
> m.add_module('s', nn.Tanh())
> m._modules['s'] = nn.Sigmoid()
= module itself exchanged
sub(lambda s, x: s.l(x) * 2)
> m.s = sub(lambda s, x: s.l(x) * 3)
= class exchanged
nn.ReLU()
> m.s.__class__ = nn.Tanh
= forward replaced
L()
> m.s.forward = lambda x: x * 3
> del m.s.forward
= forward of the class replaced
sub(lambda s, x: s.l(x) * 2)
> type(m.s).forward = lambda s, x: s.l(x) * 3
= forward of a part replaced
sub(lambda s, x: s.l(x) * 2)
> m.s.l.forward = lambda x: x * 3
> del m.s.l.forward
= hook added
L()
> h = m.s.register_forward_hook(lambda mod, args, out: out * 3)
> h.remove()
= hook within added
sub(lambda s, x: s.l(x))
> h = m.s.l.register_forward_pre_hook(lambda mod, args: (args[0] * 3,))
> h.remove()
= weight exchanged
L()
> m.s.weight = nn.Parameter(m.s.weight.detach() * 2)
> m.s.weight.data = m.s.weight.data * 2
= weight frozen
L()
> m.s.weight.requires_grad_(False)
> m.s.weight.requires_grad_(True)
= bias taken away
L()
> m.s.bias = None
= weight parametrized
L()
> nn.utils.parametrizations.weight_norm(m.s)
= buffer exchanged
sub(lambda s, x: s.l(x) * s.b, b=nn.Buffer(torch.ones(4)))
> m.s.b.fill_(2.0)
> m.s.b = torch.full((4,), 3.0)
> m.s.register_buffer('b', torch.zeros(4))
= plain tensor exchanged
sub(lambda s, x: s.l(x) * s.t, t=torch.ones(4))
> m.s.t.fill_(2.0)
> m.s.t = torch.zeros(4)
= mode of a part
sub(lambda s, x: s.l(x) * (2 if s.l.training else 3))
> m.s.l.eval()
> m.eval()
> m.train()
= a number that changes each time
sub(lambda s, x: s.l(x) * s.tau, tau=1.0)
> for step in range(12): m.s.tau = 0.9 ** step
= operation
op
> GAIN = 2.0
= precision
L()
> m.double(); xs = [x.detach().double().requires_grad_() for x in xs]
"""

# Whole models.
WHOLE = """
= loss with an attribute
m = model(lambda self, x: self.c(self.l(x), torch.tensor(1)), l=L(), c=nn.CrossEntropyLoss())
> m.c.label_smoothing = 0.5
> m.c.reduction = 'sum'
> m.c.label_smoothing = 0.0
= number set for each instance
def f(self, x):
    self.s.tau = 1 + int(x.detach()[0] > 0)
    return self.s(x)
m = model(f, s=sub(lambda s, x: s.l(x) * s.tau, tau=1))
>
>
= number set for each instance from its length
def f(self, x):
    self.s.tau = len(x) * 0.5
    return self.s(x)
m = model(f, s=sub(lambda s, x: s.l(x) * s.tau, tau=0.5))
> xs = [x[:4] for x in xs]; m.s.tau = 2.0
= attribute of the model
m = model(lambda self, x: self.l(x) * self.g, l=L(), g=1.0)
> m.g = 2.0
> m.g = 1
= traced, with an attribute of the model
m = model(lambda self, x: self.l(x) * self.g, l=L(), g=1.0); data = fxbatch.TracedDataset(m, xs)
call = lambda: m([data[i] for i in range(len(xs))])
> m.g = 2.0
> m.g = 1.0
= traced, with a number of a part
m = model(through, l=L(), s=nn.LeakyReLU(0.1)); data = fxbatch.TracedDataset(m, xs)
call = lambda: m([data[i] for i in range(len(xs))])
> m.s.negative_slope = 0.9
> m.s = nn.Tanh()
= list that grows in a submodule
m = model(through, l=L(), s=sub(lambda s, x: (s.n.append(1), s.l(x) * len(s.n))[1], n=[]))
seen = lambda: len(m.s.n)
>
> m.s.n.clear()
= list that grows
m = model(lambda self, x: (self.n.append(1), self.l(x) * len(self.n))[1], l=L(), n=[])
seen = lambda: len(m.n)
>
= counter in a submodule
def f(s, x):
    s.n += 1
    return s.l(x) * s.n
m = model(through, l=L(), s=sub(f, n=0))
seen = lambda: m.s.n
>
> m.s.n = 0
= counter in a global dictionary
calls = {'n': 0}
def f(s, x):
    calls['n'] += 1
    return s.l(x)
m = model(through, l=L(), s=sub(f))
seen = lambda: calls['n']
>
>
= counter in a global
N = 0
def f(s, x):
    global N
    N += 1
    return s.l(x) * N
m = model(through, l=L(), s=sub(f))
seen = lambda: N
>
= counter in a class
def f(s, x):
    type(s).n += 1
    return s.l(x)
m = model(through, l=L(), s=sub(f)); type(m.s).n = 0
seen = lambda: type(m.s).n
>
= counter in a closure
def made():
    n = 0
    def f(s, x):
        nonlocal n
        n += 1
        return s.l(x) * n
    return f
m = model(through, l=L(), s=sub(made()))
>
= iterator
count = itertools.count()
m = model(through, l=L(), s=sub(lambda s, x: s.l(x) * next(count)))
seen = lambda: next(count)
>
= own random numbers
rng = random.Random(3)
m = model(through, l=L(), s=sub(lambda s, x: s.l(x) * rng.random()))
seen = lambda: rng.random()
>
= set, deque and dictionary
def f(s, x):
    s.a.add(len(s.a)); s.q.append(1); s.d[len(s.d)] = 2
    return s.l(x) * len(s.a) * len(s.q) * len(s.d)
m = model(through, l=L(), s=sub(f, a=set(), q=collections.deque(maxlen=3), d={}))
seen = lambda: (m.s.a, m.s.q, m.s.d)
>
= logged tensors
def f(s, x):
    y = s.l(x)
    s.log.append(y.detach())
    return y
m = model(through, l=L(), s=sub(f, log=[]))
seen = lambda: [(isinstance(t, torch.Tensor), round(float(t.sum()), 3)) for t in m.s.log]
>
= logged numbers
def f(s, x):
    y = s.l(x)
    s.log.append(round(y.sum().item(), 3))
    return y
m = model(through, l=L(), s=sub(f, log=[]))
seen = lambda: m.s.log
>
= last output kept
def f(s, x):
    s.last = s.l(x)
    return s.last * 2
m = model(lambda self, x: self.s(x) + self.s.last, s=sub(f, last=None))
>
> m.eval()
= weights of attention kept
def f(s, x):
    s.weights = s.l(x).softmax(0)
    return s.weights * x
m = model(through, l=L(), s=sub(f))
> with fxbatch.disabled(): m(xs)
>
= buffer that counts
def f(s, x):
    s.n.add_(1)
    return s.l(x) * float(s.n)
m = model(through, l=L(), s=sub(f, n=nn.Buffer(torch.zeros(1))))
seen = lambda: float(m.s.n)
>
= printed lines
out = io.StringIO()
def f(s, x):
    print('x', file=out)
    return s.l(x)
m = model(through, l=L(), s=sub(f))
seen = lambda: out.getvalue()
>
= cache in a submodule
def f(s, x):
    s.mem.append(s.l(x))
    return torch.stack(s.mem).sum(0)
m = model(lambda self, x: (self.s.mem.clear(), self.s(x), self.s(x * 2))[-1], s=sub(f, mem=[]))
>
= cache across instances
def f(s, x):
    s.mem.append(s.l(x).detach())
    return torch.stack(s.mem).sum(0)
m = model(lambda self, x: self.s(x), s=sub(f, mem=[]))
> m.s.mem.clear()
= hook that counts
m = model(through, l=L(), s=L()); n = []
m.s.register_forward_hook(lambda mod, args, out: n.append(1))
seen = lambda: len(n)
>
> n.clear()
= state across a branch on a value
def f(self, x):
    self.h = self.l(x)
    if self.h.sum() > 0:
        self.h = self.h * 2
    return self.h
m = model(f, l=L())
>
= state of a part across a branch
def f(self, x):
    self.s.h = self.l(x)
    if self.s.h.sum() > 0:
        self.s.h = self.s.h * 2
    return self.s.h + self.k(self.s.h)
m = model(f, l=L(), k=L(), s=nn.Identity())
>
= state in a dictionary across a branch
def f(self, x):
    self.d['h'] = self.l(x)
    if self.d['h'].sum() > 0:
        self.d['h'] = self.d['h'] * 2
    return self.d['h']
m = model(f, l=L(), d={})
>
= number of the model across a branch
def f(self, x):
    self.depth = int(x.detach()[0] > 0)
    y = self.l(x)
    if y.sum() > 0:
        y = y * 2
    return y * (1 + self.depth)
m = model(f, l=L(), depth=0)
>
= list of the model across a branch
def f(self, x):
    self.stack.append(self.l(x))
    if self.stack[-1].sum() > 0:
        self.stack.append(self.k(x))
    y = sum(self.stack)
    self.stack.clear()
    return y
m = model(f, l=L(), k=L(), stack=[])
>
= context variable
var = contextvars.ContextVar('var')
def f(self, x):
    var.set(self.l(x))
    if var.get().sum() > 0:
        var.set(var.get() * 2)
    return var.get()
m = model(f, l=L())
>
= default precision within
def f(self, x):
    y = self.l(x)
    torch.set_default_dtype(torch.float64)
    try:
        if y.sum() > 0:
            y = y * 2
        return y + torch.zeros(4)
    finally:
        torch.set_default_dtype(torch.float32)
m = model(f, l=L())
seen = lambda: torch.get_default_dtype()
>
= output redirected within
def f(self, x):
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        y = self.l(x)
        if y.sum() > 0:
            y = y * 2
        print('here')
    return y * len(text.getvalue())
m = model(f, l=L())
seen = lambda: type(sys.stdout).__name__
>
= scripted function
m = model(lambda self, x: self.l(x) + scripted(self.l(x)).sum(), l=L())
>
= traced function of torch
traced = torch.jit.trace(lambda v: v * 2 + 1, torch.randn(4))
m = model(lambda self, x: traced(self.l(x)), l=L())
>
= Tensor of a value
m = model(lambda self, x: torch.Tensor(self.l(x).detach()) * 2, l=L())
>
= FloatTensor of a value
m = model(lambda self, x: torch.FloatTensor(self.l(x).detach()).sum() * x, l=L())
>
= strides
m = model(lambda self, x: self.l(x).view(2, 2).t() * self.l(x).view(2, 2).t().stride(0), l=L())
>
= contiguity
m = model(lambda self, x: x * (2 if self.l(x).view(2, 2).t().is_contiguous() else 3), l=L())
>
= offset
m = model(lambda self, x: x * self.l(x)[2:].storage_offset(), l=L())
>
= address
def f(self, x):
    a, b = self.l(x), self.k(x)
    return x * (2 if a.data_ptr() == b.data_ptr() else 3)
m = model(f, l=L(), k=L())
>
= as_strided
m = model(lambda self, x: self.l(x)[2:].as_strided((2,), (1,), 0), l=L())
>
>
= clamp without gradients
def f(self, x):
    h = self.l(x)
    with torch.no_grad():
        h.clamp_(-1, 1)
    return self.k(h)
m = model(f, l=L(), k=L())
>
= mask without gradients
def f(self, x):
    h = self.l(x)
    with torch.no_grad():
        h[h > 0] = 0
    return self.k(h)
m = model(f, l=L(), k=L())
>
= detached, then what has no derivative
m = model(lambda self, x: (self.l(x).detach() // 0.3, self.k(x)), l=L(), k=L())
>
= detached in a submodule
m = model(lambda self, x: self.s(self.k(x)) + self.k(x), k=L(), s=sub(lambda s, x: s.l(x).detach()))
>
= data written
def f(self, x):
    y = self.l(x)
    y.data.mul_(2)
    return y * x
m = model(f, l=L())
>
= copy of a value
m = model(lambda self, x: copy.copy(self.l(x)) * self.k(x), l=L(), k=L())
>
= deep copy of a value
m = model(lambda self, x: copy.deepcopy(self.l(x).detach()) * self.k(x), l=L(), k=L())
>
= frozen within
def f(self, x):
    self.l.requires_grad_(False)
    y = self.l(x)
    self.l.requires_grad_(True)
    return self.k(y)
m = model(f, l=L(), k=L())
>
= table with a padding row
m = model(lambda self, x: self.e(torch.tensor([0, 1])).sum(0) * self.l(x), e=nn.Embedding(4, 4, padding_idx=0), l=L())
>
= table scaled by frequency
e = nn.Embedding(4, 4, scale_grad_by_freq=True)
m = model(lambda self, x: self.e(torch.tensor([1, 1, 2])).sum(0) * self.l(x), e=e, l=L())
>
= modules made in the forward
m = model(lambda self, x: nn.CrossEntropyLoss()(nn.ReLU()(self.l(x)), torch.tensor(1)), l=L())
>
>
= model used alone, then inside another
class Enc(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = L()
    @fxbatch.autobatch
    def forward(self, x):
        return self.l(x).relu()
m = model(lambda self, x: self.l(self.enc([x, x * 2]).sum(0)), l=L(), enc=Enc())
> m.enc(torch.randn(6, 4))
>
= lazy module
m = model(lambda self, x: self.z(self.l(x)), l=L(), z=nn.LazyLinear(3))
>
= autocast around the call
m = model(lambda self, x: self.k(self.l(x)), l=L(), k=L())
def call():
    with torch.autocast('cpu', dtype=torch.bfloat16, enabled=ON):
        return m(xs)
ON = False
> ON = True
> ON = False
= traced outside, run in autocast
m = model(lambda self, x: self.k(self.l(x)), l=L(), k=L()); data = fxbatch.TracedDataset(m, xs); ON = False
def call():
    with torch.autocast('cpu', dtype=torch.bfloat16, enabled=ON):
        return m([data[i] for i in range(len(xs))])
> ON = True
> ON = False
= data written between
m = model(through, l=L(), s=nn.Tanh())
> xs[0].data.mul_(3)
> xs = [x * 1 for x in xs]
"""

# Right, or a clear error.
MAY_REFUSE = {
    "cache across instances", "state in a dictionary across a branch", "list of the model across a branch",
    "context variable", "default precision within", "output redirected within", "logged numbers", "scripted function",
    "traced function of torch", "Tensor of a value", "FloatTensor of a value", "strides", "contiguity", "offset",
    "address", "as_strided", "lazy module", "frozen within", "number of the model across a branch",
    "state of a part across a branch", "state across a branch on a value",
    "clamp without gradients", "mask without gradients", "data written",
    "weights of attention kept", "last output kept", "logged tensors",
}  # fmt: skip

DEFINED = """
KEY = 'FXBATCH_ORDINARY_GAIN'
GAIN = 0.5
act = torch.tanh
def gained(y): return y * GAIN
def twofold(y, gain=2.0): return y * gain
def scaled(s, x, gain=2.0): return s.l(x) * gain
def closed(cell=[]):
    if not cell:
        gain = 2.0
        def f(s, x): return s.l(x) * gain
        def put(v):
            nonlocal gain
            gain = v
        cell.extend((f, put))
    return cell
class Prop(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.base = L(), 1.0
    gain = property(lambda self: self.base * 2)
    def forward(self, x): return self.l(x) * self.gain
@fxbatch.operation
def op(y): return y.tanh() * GAIN
scripted = torch.jit.CompilationUnit("def double(v):\\n    return v * 2\\n").double
"""


def sources() -> dict[str, tuple[str, list[str]]]:
    """Name to (source that makes `m`, steps)."""
    found = {}
    for name, (made, steps) in _cases(READ).items():
        found[name] = (f"m = model(through, l=L(), s={made})", steps)
    return found | _cases(WHOLE)


def _cases(text: str) -> dict[str, tuple[str, list[str]]]:
    found: dict[str, tuple[str, list[str]]] = {}
    for case in text.strip().removeprefix("= ").split("\n= "):
        name, *lines = case.split("\n")
        source = "\n".join(line for line in lines if not line.startswith(">"))
        found[name] = (source, [line[1:].strip() for line in lines if line.startswith(">")])
    return found
