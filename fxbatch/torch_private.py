"""The only module that imports private torch APIs; each line says the versions it was checked against.

`tests/test_torch_private.py` fails with a clear message when one of them moves.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import linecache
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

# Checked against 2.11.0 and 2.13.0: whether any autocast is on, in one call; the stacks of modes of a thread.
from torch._C import (
    DisableTorchFunctionSubclass,
    _get_function_stack_at,
    _is_any_autocast_enabled,
    _is_torch_function_enabled,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
    _set_grad_enabled,
)

# Checked against 2.11.0 and 2.13.0: what core_aten_decompositions() gives besides calls that have a vmap rule in C++,
# without the list of these, which takes 0.1 s to make.
from torch._decomp import _core_aten_decompositions_post_autograd, decomposition_table

# Checked against 2.11.0 and 2.13.0: where torch.func's transforms wrap tensors (_wrap_tensor_for_grad, _add_batch_dim).
from torch._functorch import eager_transforms as functorch_transforms
from torch._functorch import vmap as functorch_vmap
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

# Checked against 2.11.0 and 2.13.0: torch.autograd.grad without its look at shapes, which imports sympy.
from torch.autograd.graph import _engine_run_backward as run_backward

# Checked against 2.11.0 and 2.13.0: a GraphModule whose code is made when it is asked for.
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule

# Checked against 2.11.0 and 2.13.0: where the source of each GraphModule is kept, for tracebacks.
from torch.fx.graph_module import _loader

# Checked against 2.11.0 and 2.13.0: whether hooks are registered on all modules.
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks

# Checked against 2.11.0 and 2.13.0: what torch.func.functional_call calls (_functional_call), and does around it.
from torch.nn.utils import parametrize, stateless
from torch.nn.utils.stateless import _reparametrize_module as reparametrized

# Checked against 2.11.0 and 2.13.0: what torch's Python functions call when they meet a subclass of Tensor.
from torch.overrides import _is_torch_function_mode_enabled as function_modes_enabled
from torch.overrides import handle_torch_function, has_torch_function_variadic

# Checked against 2.11.0 and 2.13.0.
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import SUPPORTED_NODES, TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils._pytree import register_pytree_node as register_node

# Checked against 2.11.0 and 2.13.0: flattening of nested containers, as torch.vmap does it; what a checkpoint raises in
# what it runs again once it has all that it wants.
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.checkpoint import _StopRecomputationError as EndOfCheckpoint

# Checked against 2.11.0 and 2.13.0: what torch.are_deterministic_algorithms_enabled() asks, without a frame of Python:
# it is asked at each wait of each instance.
are_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms


def backward_keeps_graph() -> bool:
    """Whether the backward pass under way was asked to retain the graph. Checked: 2.11.0, 2.13.0."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def sequence_number(node: Any) -> int:
    """The number of a node of autograd's graph, counted in each thread as they are made; a backward pass runs ready
    nodes from the largest number down. Leaves have the largest of all. Checked: 2.11.0, 2.13.0."""
    number: int = node._sequence_nr()
    return number


def next_sequence_number() -> int:
    """The number that the next node of this thread gets. Checked: 2.11.0, 2.13.0."""
    return torch.autograd._get_sequence_nr()


def graph_task() -> int:
    """A number of the backward pass under way. Checked: 2.11.0, 2.13.0."""
    return torch._C._current_graph_task_id()


def compile_symbolic(
    function: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    dynamic: Sequence[Sequence[bool]],
    rows: int,
    patches: Mapping[str, Any],
) -> tuple[Callable[[list[Any]], Any], Callable[[int], bool]]:
    """`function(n, *tensors)` through Inductor for any number of rows n, without Dynamo and its guards.

    dynamic: per tensor and dimension, if it is as long as n. rows: n in `tensors`. patches: Inductor's options.
    Returns (run, fits): `run([n, *tensors])` empties the list it is given; `fits(n)` says whether what was compiled
    assumes nothing that isn't so for n. Inductor is imported here, as it takes a second. Checked: 2.11.0, 2.13.0.
    """
    import torch._inductor.config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    env = ShapeEnv()
    start_engine()
    mode = FakeTensorMode(shape_env=env)
    fakes = []
    for tensor, flags in zip(tensors, dynamic, strict=True):
        sizes = [DimDynamic.DUCK if flag else DimDynamic.STATIC for flag in flags]
        context = StatelessSymbolicContext(dynamic_sizes=sizes, constraint_sizes=[None] * len(sizes))  # type: ignore[var-annotated]
        fakes.append(mode.from_tensor(tensor, symbolic_context=context))
    found = [f.shape[d] for f, flags in zip(fakes, dynamic, strict=True) for d, x in enumerate(flags) if x]
    n: Any = found[0] if found else rows
    inner = torch._inductor.config.patch(**{"size_asserts": False, **patches})
    with torch.no_grad(), mode, inner:
        module = make_fx(function, decomposition_table=select_decomp_table())(n, *fakes)
        compiled: Any = compile_fx_inner(module, [n, *fakes])
    symbol = n.node.expr if isinstance(n, torch.SymInt) else None

    def fits(count: int) -> bool:
        if symbol is None:
            return count == rows
        return all(guard.expr.xreplace({symbol: count}) == True for guard in env.guards)  # noqa: E712 sympy's

    return compiled.current_callable, fits


@functools.cache
def start_engine() -> None:
    """Have autograd's engine look for devices, once, before there is a mode of fakes: where CUDA is built and not
    there, such a mode says that there is one, and the engine starts a thread for it, after which no forked process can
    go backward. Checked: 2.11.0, 2.13.0."""
    if torch.backends.cuda.is_built() and not torch.cuda.is_available():
        with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad(), outside_functorch():
            torch.zeros((), requires_grad=True).clone().backward()


def fake_mode(*, allow_non_fake_inputs: bool = False) -> FakeTensorMode:
    """A mode of fake tensors, whose sizes are numbers. The first call on one has torch import torch._dynamo (1.4 s),
    which every optimizer imports anyway."""
    start_engine()
    return FakeTensorMode(allow_non_fake_inputs=allow_non_fake_inputs)


@functools.cache
def shape_environment() -> type[Any]:
    """A ShapeEnv that doesn't look for the line behind each symbol and guard, which nobody reads here: torch imports
    torch.export and Inductor to tell its own files from the user's (0.2 s). Checked: 2.13.0."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv, SLoc

    class WithoutLines(ShapeEnv):
        fixed: object = None  # a size that is a number by now
        numbers: Mapping[Any, Any] = {}  # what guards say that expressions are

        def _get_stack_summary(self, *args: Any, **kwargs: Any) -> tuple[SLoc, str]:
            return SLoc(None, None), ""

        def _set_replacement(self, a: Any, tgt: Any, *args: Any, **kwargs: Any) -> None:
            super()._set_replacement(a, tgt, *args, **kwargs)
            if tgt.is_number and a.name.startswith("s"):  # others are of sizes that depend on values
                self.fixed = tgt

        def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
            answer = super().evaluate_expr(*args, **kwargs)
            self.refuse_plain_numbers()
            return answer

        def refuse_plain_numbers(self) -> None:
            if self.fixed is not None:
                text = f"its code needs a size as a plain number ({self.fixed} here), as a loop does"
                raise PlainNumberError(text)

    return WithoutLines


class PlainNumberError(Exception):
    """Code that is traced needs a size as a plain number. Raised where it asks for it: loops are long."""


def fakes_to_trace(
    tensors: Sequence[torch.Tensor], dynamic: Sequence[Sequence[int]]
) -> tuple[FakeTensorMode, Any, list[torch.Tensor]]:
    """Fakes of tensors, with symbols for the sizes of some dimensions, in a mode and a shape environment of their own.

    dynamic: per tensor, the dimensions that get a symbol; no two sizes share one, and 0 and 1 are sizes like others.
    Checked: 2.13.0.
    """
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    start_engine()
    env = shape_environment()(specialize_zero_one=False, duck_shape=False)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    # A cache of this environment's sizes alone: filling it takes longer than what is asked of it again.
    mode.cache_enabled = False

    def fake(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
        kinds = [DimDynamic.DYNAMIC if d in dims else DimDynamic.STATIC for d in range(x.dim())]
        context = StatelessSymbolicContext(dynamic_sizes=kinds, constraint_sizes=[None] * len(kinds))  # type: ignore[var-annotated]
        return mode.from_tensor(x, symbolic_context=context)

    return mode, env, list(map(fake, tensors, dynamic))


def trace_with_sizes(
    function: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    dynamic: Sequence[Sequence[int]],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> tuple[Any, Any]:
    """`function(*tensors)` as a graph of operators as they are called, before autograd, with symbols for some sizes.

    Returns (graph module, shape environment): its guards say for which sizes the graph is the function.
    PlainNumberError where the function needs one of the sizes that have a symbol as a plain number.
    Checked: 2.13.0.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    mode, env, fakes = fakes_to_trace(tensors, dynamic)
    with mode, inline_compiled_functions():
        # "real", as the tensors are fakes already: it would make others of them.
        graph = make_fx(
            function, tracing_mode="real", pre_dispatch=True, decomposition_table=dict(decompositions)
        )(*fakes)
    env.refuse_plain_numbers()  # once more: the code may have caught the error
    return graph, env


def without_symbols(fake: Any) -> bool:
    """Whether the sizes of a fake tensor are plain numbers. Checked: 2.11.0, 2.13.0."""
    return fake.fake_mode.shape_env is None


def depends_on_values(size: Any) -> bool:
    """Whether a size is a symbol of which no example is known. Checked: 2.11.0, 2.13.0."""
    return type(size) is torch.SymInt and not size.node.has_hint()


@functools.cache
def composite_operators() -> frozenset[str]:
    """Names of the operators that are made of others ("aten::einsum"). Checked: 2.13.0."""
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))


def inductor_mode_options(name: str | None) -> dict[str, Any]:
    """The configuration that a mode of torch.compile stands for. Checked: 2.11.0, 2.13.0."""
    import torch._inductor

    return dict(torch._inductor.list_mode_options(name)) if name else {}


@functools.cache
def let_dynamo_read_torch() -> None:
    """Have Dynamo list torch's functions now, before some are patched: it lists them once, by identity.

    Tracing operations imports Dynamo anyway; were `torch.zeros` another function just then, no code compiled
    later in the process could call it. Checked: 2.11.0, 2.13.0.
    """
    # A stub in sys.modules has no __spec__: nothing can be compiled then.
    with contextlib.suppress(ValueError):
        from torch._dynamo import trace_rules

        trace_rules.get_torch_obj_rule_map()


@functools.cache
def dynamo_questions() -> tuple[tuple[Any, str, Callable[..., Any], Any], ...]:
    """Functions that a compiled function calls first: (module, name, function, the answer for "run as plain Python").

    Which frames to compile; whether none was, which fullgraph=True takes for an error. What a version doesn't ask is
    left out. Checked: 2.13.0.
    """
    try:
        from torch._dynamo import eval_frame
    except ValueError:  # as above
        return ()
    answers = {"_callback_from_stance": None, "set_fullgraph_compiled_frame_count": 0}
    return tuple(
        (eval_frame, name, getattr(eval_frame, name), answer)
        for name, answer in answers.items()
        if hasattr(eval_frame, name)
    )


def inline_compiled_functions() -> contextlib.AbstractContextManager[Any]:
    """Within it, make_fx traces through compiled functions, which refuse that otherwise. Checked: 2.11.0, 2.13.0."""
    import torch._dynamo.config

    return torch._dynamo.config.patch(error_on_nested_fx_trace=False)


_set_eval_frame = torch._C._dynamo.eval_frame.set_eval_frame


_KEYS = torch._C.DispatchKey
_with_key = torch._C._SetExcludeDispatchKeyGuard


class QuietDispatchMode(TorchDispatchMode):
    """A dispatch mode that torch.compile need not know: the first use of another one imports torch._dynamo (0.9 s).

    Checked against 2.11.0 and 2.13.0: `_should_skip_dynamo` is asked when a class is made.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @staticmethod
    def call(func: Any, args: Any, kwargs: Any) -> Any:
        """The call as it is without a mode: in one, torch leaves out what resolves views that are conjugated or negated
        (`pinv` of complex numbers is wrong). Checked: 2.11.0, 2.13.0.
        """
        with _with_key(_KEYS.Conjugate, False), _with_key(_KEYS.Negative, False):
            return func(*args, **(kwargs or {}))


def hide_from_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make torch.compile break its graph at calls of the function and look at nothing inside.

    What torch.compiler.disable does, without importing torch._dynamo, which takes a second. Calls in the function
    that are to be left alone go between `eval_frame_off()` and `eval_frame_on`. Checked: 2.11.0, 2.13.0.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # a graph that meets it breaks
    why = "fxbatch batches this call itself; to export it: strict=False"
    function._torchdynamo_disable_msg = why  # type: ignore[attr-defined]  # as above
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, skip)  # its own frame isn't looked at
    return function


def eval_frame_off() -> Any:
    """Stop Dynamo from looking at frames in this thread; returns what `eval_frame_on` takes."""
    return _set_eval_frame(None)


eval_frame_on = _set_eval_frame


def direct_call(overload: Any) -> Any:
    """The C++ function behind an OpOverload: 0.4-0.7 us a call cheaper. Checked: 2.11.0, 2.13.0."""
    return overload._op


def apply_outside_functorch(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply` where no transform of torch.func is at work, without its look for what transforms have left.
    Checked: 2.11.0, 2.13.0."""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]  # of torch._C._FunctionBase


@contextlib.contextmanager
def native_kernels() -> Iterator[None]:
    """Without cuDNN and oneDNN, whose whole-layer calls (an LSTM) vmap can't batch. Checked: 2.11.0, 2.13.0."""
    library: Any = torch._C
    before = library._get_cudnn_enabled(), library._get_mkldnn_enabled()
    library._set_cudnn_enabled(False)
    library._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        library._set_cudnn_enabled(before[0])
        library._set_mkldnn_enabled(before[1])


def has_vmap_rule(overload: Any) -> bool:
    """Whether vmap can batch this OpOverload other than by a loop over rows. Checked: 2.11.0, 2.13.0."""
    dispatcher: Any = torch._C
    return any(
        dispatcher._dispatch_has_kernel_for_dispatch_key(overload.name(), key)
        for key in ("FuncTorchBatched", "FuncTorchBatchedDecomposition", "CompositeImplicitAutograd")
    )


def decompositions_without_vmap_rule() -> dict[Any, Callable[..., Any]]:
    """PyTorch's own decompositions of the calls that vmap has no rule for. Checked: 2.11.0, 2.13.0."""
    aten = torch.ops.aten
    more = [getattr(aten, f"_upsample_nearest_exact{n}d").default for n in (1, 2, 3)]
    rules = _core_aten_decompositions_post_autograd() | {op: decomposition_table[op] for op in more}
    return {op: rule for op, rule in rules.items() if not has_vmap_rule(op)}


def elementwise_under_vmap(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call that broadcasts, inside vmap, made on the whole batches. Checked: 2.11.0, 2.13.0."""
    functorch: Any = torch._C._functorch
    level = functorch.maybe_current_level()
    is_batched = lambda x: isinstance(x, torch.Tensor) and functorch.maybe_get_level(x) == level  # noqa: E731
    rank = max((x.dim() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)), default=0)

    def whole(x: Any) -> Any:
        if not is_batched(x):
            return x
        lead = functorch._unwrap_batched(x, level)
        value = lead[0].movedim(lead[1], 0)
        return value.reshape(value.shape[0], *[1] * (rank - x.dim()), *value.shape[1:])

    if not any(is_batched(x) for x in tree_leaves((args, kwargs))):
        return function(*args, **kwargs)
    result = function(*tree_map(whole, args), **tree_map(whole, kwargs))
    return tree_map(lambda x: functorch._add_batch_dim(x, 0, level), result)


@contextlib.contextmanager
def no_vmap_fallback() -> Iterator[None]:
    """An operation without a batching rule raises, in place of a loop over rows. Checked: 2.11.0, 2.13.0."""
    functorch: Any = torch._C._functorch  # torch's own types lack these two
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)


_fakes_are_quiet = contextvars.ContextVar("fakes are quiet", default=False)
logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda _: not _fakes_are_quiet.get())


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """What fake tensors raise within they don't log besides. Checked: 2.11.0, 2.13.0."""
    before = _fakes_are_quiet.set(True)
    try:
        yield
    finally:
        _fakes_are_quiet.reset(before)


@contextlib.contextmanager
def forget_traces() -> Iterator[None]:
    """Let go of what torch would keep for ever of the graphs that are made within, 10 KB an operation. What fake
    tensors raise they don't log besides.

    That is each graph's source, for lines in tracebacks (graphs that another thread makes meanwhile lose theirs
    too), and what operators gave for fake tensors, once there are many. Checked: 2.11.0, 2.13.0.
    """
    first = _loader.next_id
    try:
        with quiet_fakes():
            yield
    finally:
        made = _loader.next_id - first
        for name in list(_loader.eval_cache)[-made:] if made else ():
            number = re.match(r"<eval_with_key>\.(\d+)", name)
            if number and int(number[1]) >= first:
                _loader.eval_cache.pop(name, None)
                linecache.cache.pop(name, None)
        if len(FakeTensorMode.cache) > 1 << 14:
            FakeTensorMode.cache_clear()


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """A tensor's storage, None where it has none: wrapped by vmap or another transform, sparse, opaque.

    Checked: 2.11.0, 2.13.0.
    """
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


def storage_uses(storage: torch.UntypedStorage) -> int:
    """How many hold a storage, the object given included. Checked against torch 2.11 and 2.13."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def outside_functorch() -> contextlib.AbstractContextManager[Any]:
    """Within it no transform of torch.func is at work: what is computed is not wrapped. Checked: 2.11.0, 2.13.0."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack() if inside_functorch() else contextlib.nullcontext()


def is_wrapped(x: torch.Tensor) -> bool:
    """Whether a transform of torch.func has wrapped a tensor."""
    found: bool = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return found


def inside_functorch() -> bool:
    """Whether a torch.func transform (grad, vmap, ...) is active. Checked: 2.11.0, 2.13.0."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def profiler_enabled() -> bool:
    """Whether one of torch's profilers is on. Checked: 2.11.0, 2.13.0."""
    return bool(torch._C._autograd._profiler_enabled())


# How many torch dispatch modes this thread is in. Checked: 2.11.0, 2.13.0.
dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack


def memory_is_real() -> bool:
    """Whether calls compute numbers in memory here: no fake or functional tensors, no graph that is traced.

    The modes of FakeTensorMode, make_fx (PROXY) and functionalization are asked for by their places on the stack;
    other dispatch modes (counters of operations, say) only watch. Checked: 2.11.0, 2.13.0.
    """
    if torch.jit.is_tracing():
        return False
    if not torch._C._len_torch_dispatch_stack():
        return True
    kinds = torch._C._TorchDispatchModeKey
    return all(torch._C._get_dispatch_mode(k) is None for k in (kinds.FAKE, kinds.PROXY, kinds.FUNCTIONAL))


def is_pytree_node(kind: type) -> bool:
    """Whether tree_flatten takes objects of this type apart."""
    return kind in SUPPORTED_NODES


def children_of(spec: TreeSpec) -> list[TreeSpec]:
    """The structures inside a structure: a method from torch 2.13 on."""
    return list(spec.children() if hasattr(spec, "children") else spec.children_specs)


def swap_function_modes(modes: list[Any]) -> list[Any]:
    """Replace this thread's torch function modes by `modes`; returns what was there, bottom first."""
    if not modes and not _len_torch_function_stack():
        return []
    before = [_get_function_stack_at(i) for i in range(_len_torch_function_stack())]
    if before != modes:
        for _ in before:
            _pop_torch_function_stack()
        for mode in modes:
            _push_on_torch_function_stack(mode)
    return before


def function_modes() -> list[Any]:
    """This thread's torch function modes, bottom first."""
    return [_get_function_stack_at(i) for i in range(_len_torch_function_stack())]


function_mode_count: Callable[[], int] = _len_torch_function_stack  # a C function, for hot paths


def _warning_handlers() -> tuple[Callable[[], int | None], Callable[[int | None], None]]:
    """c10::WarningUtils of the library that is loaded. Checked: 2.11.0, 2.13.0, Linux; elsewhere nothing."""
    path = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        library = ctypes.PyDLL(str(path))
        found = library["_ZN3c1012WarningUtils19get_warning_handlerEv"]
        put = library["_ZN3c1012WarningUtils19set_warning_handlerEPNS_14WarningHandlerE"]
    except (OSError, AttributeError):
        return (lambda: None), (lambda handler: None)
    found.restype, found.argtypes = ctypes.c_void_p, ()
    put.restype, put.argtypes = None, (ctypes.c_void_p,)
    return found, put


# Who gets this thread's C++ warnings. A binding of torch puts an object on its C stack in that place, and takes it
# away when it returns: a stack that is left by a switch of greenlets must take its handler along.
warning_handler, set_warning_handler = _warning_handlers()


# The cheap form for hot paths: a C function, no Python frame.
any_autocast = _is_any_autocast_enabled
functions_enabled = _is_torch_function_enabled
set_grad_enabled = _set_grad_enabled
module_call = torch.nn.Module._wrapped_call_impl

# Checked against 2.11.0 and 2.13.0: where torch.nn.utils.parametrize keeps whether results are cached.
CACHED_PARAMETRIZATIONS = vars(parametrize), "_cache_enabled"

FAKE_ATTRIBUTES = frozenset(dir(FakeTensor))  # of fake tensors, and so of all tensors

__all__ = [
    "CACHED_PARAMETRIZATIONS",
    "FAKE_ATTRIBUTES",
    "run_backward", "LazyGraphModule", "outside_functorch", "is_wrapped",
    "DisableTorchFunctionSubclass",
    "CheckpointFunction", "EndOfCheckpoint", "forward_mode", "all_saved_tensor_hooks", "saved_tensors_are_packed",
    "swap_saved_tensor_hooks", "without_saved_tensor_hooks", "storage_users",
    "dynamo_questions", "inline_compiled_functions",
    "eval_frame_off", "eval_frame_on", "hide_from_dynamo", "compile_symbolic",
    "forget_traces", "let_dynamo_read_torch", "product_address", "quiet_fakes",
    "thread_addresses", "inductor_mode_options", "DataDependentOutputException",
    "DynamicOutputShapeException", "FakeTensor", "FakeTensorMode", "TorchDispatchMode",
    "UnsupportedOperatorException", "any_autocast", "fake_mode", "function_mode_count", "function_modes",
    "function_modes_enabled", "functions_enabled", "functorch_transforms", "functorch_vmap", "handle_torch_function",
    "has_global_hooks", "module_call", "reparametrized", "set_grad_enabled", "set_warning_handler", "stateless",
    "swap_function_modes", "TreeSpec", "backward_keeps_graph", "decompositions_without_vmap_rule",
    "direct_call", "dispatch_mode_count", "profiler_enabled",
    "elementwise_under_vmap", "has_vmap_rule", "inside_functorch", "is_pytree_node", "children_of", "register_node",
    "native_kernels", "no_vmap_fallback", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten",
    "warning_handler",
    "memory_is_real", "mode_addresses", "storage_of", "storage_uses", "has_torch_function_variadic",
    "apply_outside_functorch", "graph_task", "next_sequence_number", "sequence_number",
]  # fmt: skip


def product_address() -> int:
    """Where torch's library has BLAS' `sgemm_` (32-bit integers, Fortran's convention), 0 where it shows none.

    The library is loaded already: nothing is loaded here. Checked: 2.11.0, 2.13.0 (x86-64 wheels, with MKL).
    """
    return _library_address("sgemm_")


def thread_addresses() -> tuple[int, int, int, int]:
    """GNU OpenMP's `GOMP_parallel`, `omp_get_thread_num` and `omp_get_num_threads` as torch's library has loaded them,
    all 0 where it runs on other threads; and MKL's `MKL_Set_Num_Threads_Local`, or 0. Checked: 2.11.0, 2.13.0."""
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    found = [_library_address(name) for name in names]
    if not all(found):
        found = [0, 0, 0]
    return found[0], found[1], found[2], _library_address("MKL_Set_Num_Threads_Local")


def _library_address(name: str) -> int:
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not path.exists() or not hasattr(os, "RTLD_NOLOAD"):
        return 0
    try:  # in the library, or in those that it was linked with
        found = getattr(ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW), name)
    except (OSError, AttributeError):  # another build of torch
        return 0
    return ctypes.cast(found, ctypes.c_void_p).value or 0


def mode_addresses() -> tuple[int, int, int, int]:
    """Addresses of c10's functions that say whether dispatch keys are excluded, whether gradients are on and which
    dtype is the default, for hot paths, and the keys that are excluded while no autocast is on; zeros where they are
    not found. Checked: 2.11.0, 2.13.0, Linux.
    """
    names = (
        "_ZN3c104impl31tls_is_dispatch_keyset_excludedENS_14DispatchKeySetE",
        "_ZN3c108GradMode10is_enabledEv",
        "_ZN3c1031get_default_dtype_as_scalartypeEv",
    )
    try:
        library = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        excluded, grad, dtype = (ctypes.cast(library[name], ctypes.c_void_p).value or 0 for name in names)
        return excluded, _autocast_keys(), grad, dtype
    except (OSError, AttributeError):
        return 0, 0, 0, 0


def forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is open. Checked: 2.11.0, 2.13.0."""
    return torch.autograd.forward_ad._current_level >= 0


Hooks = tuple[Callable[..., object], Callable[..., object]]  # what packs, and what unpacks

# The hooks on saved tensors that count, as in torch.utils.checkpoint; None where none are on. Checked: 2.11.0, 2.13.0.
saved_tensors_are_packed = functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, False)


def swap_saved_tensor_hooks(new: Sequence[Hooks]) -> list[Hooks]:
    """Make these the hooks on saved tensors of this thread; returns those before. Checked: 2.11.0, 2.13.0."""
    hooks: list[Hooks] = []
    while (hook := saved_tensors_are_packed()) is not None:
        hooks.append(hook)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for hook in new:
        torch._C._autograd._push_saved_tensors_default_hooks(*hook)
    return hooks[::-1]


def all_saved_tensor_hooks() -> list[Hooks]:
    """The hooks on saved tensors of this thread, the last one counts."""
    hooks = swap_saved_tensor_hooks(())
    swap_saved_tensor_hooks(hooks)
    return hooks


@contextlib.contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Within it tensors are saved as they are: what is built meanwhile is no part of the user's graph, which
    torch.utils.checkpoint counts."""
    hooks = swap_saved_tensor_hooks(())
    try:
        yield
    finally:
        swap_saved_tensor_hooks(hooks)


def storage_users(t: torch.Tensor) -> int:
    """How many tensors have the memory of this one. Checked: 2.11.0, 2.13.0."""
    return storage_uses(t.untyped_storage()) - 1  # without the object given


def _autocast_keys() -> int:
    """Dispatch keys that autocast takes out of the excluded ones, for the devices of `any_autocast`, as bits."""
    keys = 0
    for device in ("cpu", "cuda", "xpu", "ipu", "hpu", "xla", "mtia", "privateuseone"):
        was, before = torch.is_autocast_enabled(device), torch._C._dispatch_tls_local_exclude_set().raw_repr()
        torch.set_autocast_enabled(device, not was)
        changed = before ^ torch._C._dispatch_tls_local_exclude_set().raw_repr()
        keys |= changed if was or any_autocast() else 0
        torch.set_autocast_enabled(device, was)
    return keys
