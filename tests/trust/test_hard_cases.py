"""Hard cases of values: where batching by shape, by name or by memory would give something else.

Which test holds which hard case (`test_every_hard_case_has_its_test` looks that they exist):

    different operations of equal shapes     test_different_operations_of_equal_shapes_at_adjacent_depths
    `x + 1.1` and `x + 1.2`                  test_numbers_that_differ, test_numbers_that_are_almost_equal
    different `dim=`                         test_different_dim, test_keepdim_and_defaults_are_told_apart
    a tied parameter in two roles            test_a_tied_parameter_in_two_roles
    a shared operand that is a batched row   test_a_shared_operand_that_is_a_row_of_a_batched_result
    what instances return                    test_what_instances_return, test_results_of_different_structures
    empty sequences, empty minibatch         test_empty_sequences, test_empty_minibatch
    one tensor in two instances              test_one_tensor_in_two_instances
    views, aliases, in-place operations      test_views_of_one_tensor_are_instances, test_views_and_in_place_writes,
                                             test_a_constant_written_after_it_met_a_value_is_an_error
    unused outputs                           test_unused_outputs
    integer arguments that are indices       test_integer_arguments_that_are_indices, test_indices_out_of_range_raise
    `padding_idx`, sparse embedding          test_padding_idx_and_sparse
    batch-coupled operations                 test_what_would_mix_instances_does_not,
                                             test_batch_norm_in_training_is_refused
    broadcasting of mixed ranks              test_broadcasting_of_mixed_ranks
    zero-size tensors                        test_tensors_without_elements, test_reductions_of_nothing
    non-contiguous and expanded inputs       test_strides
    float64, bf16, complex                   test_dtypes, test_mixed_dtypes_in_one_minibatch, test_complex_gradients
    very wide, very deep                     test_very_wide, test_very_deep
    10,000 distinct signatures               test_many_distinct_signatures, test_ten_thousand_distinct_signatures
    a forward that raises                    test_a_forward_that_raises
    endless recursion                        test_endless_recursion_is_an_error
    Ctrl-C                                   test_an_interrupt_at_the_nth_call_of_the_forward, test_ctrl_c_at_any_moment
    a model changed between trace and run    test_a_model_changed_between_trace_and_run,
                                             test_a_model_changed_between_calls
    re-entrant and nested decorated calls    test_a_model_that_calls_itself,
                                             test_another_decorated_model_inside_a_forward
    decorated submodules, either way         test_a_decorated_submodule_in_a_decorated_model,
                                             test_a_decorated_submodule_in_a_plain_model
    hooks                                    test_hooks_of_operations_run_once_a_call, test_backward_hooks_are_refused,
                                             test_parameter_hooks_see_the_whole_gradient
    `torch.autocast`                         test_autocast, test_autocast_inside_the_forward
    `torch.func`                             test_torch_func_works_under_autograd_or_is_a_clear_error
    deepcopy and pickle mid-life             test_deepcopy_in_use, test_pickle_and_state_dict_in_use
    fork, spawn, threads                     test_a_forked_process, test_a_spawned_process,
                                             test_threads_share_a_model
    faults anywhere                          test_faults_in_a_warm_step, test_faults_in_a_cold_step
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from tests.oracle import check_equal
from tests.trust.programs import assert_equal, model, vectors


def linear(n: int = 4, m: int = 4) -> dict[str, Any]:
    return {"a": nn.Linear(n, m), "b": nn.Linear(n, m)}


# Different operations that look alike


def test_different_operations_of_equal_shapes_at_adjacent_depths() -> None:
    def forward(self: Any, x: Any) -> Any:
        for k in range(int(abs(x[0].item()) * 10) % 3 + 2):
            x = self.a(x) if k % 2 else self.b(x)
            x = torch.sin(x) if k % 2 else torch.cos(x)
        return x

    assert_equal(forward, vectors(4, 4, 4, 4, 4), linear())


def test_equal_shapes_in_other_order_by_instance() -> None:
    def forward(self: Any, sample: Any) -> Any:
        x, order = sample
        for name in order:
            x = getattr(self, name)(x)
        return x

    xs = vectors(4, 4, 4)
    assert_equal(forward, list(zip(xs, ("abab", "baba", "aabb"), strict=True)), linear())


def test_numbers_that_differ() -> None:
    def forward(self: Any, sample: Any) -> Any:
        x, n = sample
        return (self.a(x) + 1.1) * (x + 1.2) + (x + n)

    assert_equal(forward, list(zip(vectors(4, 4, 4), (1.1, 1.2, 7), strict=True)), linear())


def test_numbers_that_are_almost_equal() -> None:
    a, b = 0.1, 0.1 + 1e-12

    def forward(self: Any, sample: Any) -> Any:
        return self.a(sample[0]).double() * sample[1]

    made = model(forward, linear()).double()
    x = torch.randn(4).double()
    out = made([(x, a), (x, b)])
    assert not torch.equal(out[0], out[1])
    with fxbatch.disabled():
        torch.testing.assert_close(out, made([(x, a), (x, b)]), rtol=1e-15, atol=0)


def test_numbers_of_other_types_and_signed_zero() -> None:
    def forward(self: Any, sample: Any) -> Any:
        x, n = sample
        return torch.atan2(self.a(x) * 0, x * n), (x.long() + n)

    for numbers in ((0.0, -0.0, 1.0), (True, 1, 1.0)):
        assert_equal(forward, list(zip(vectors(4, 4, 4), numbers, strict=True)), linear(), out="list")


@pytest.mark.parametrize("dims", [(0, 1, 0), (0, -1, -2)])
def test_different_dim(dims: tuple[int, ...]) -> None:
    def forward(self: Any, sample: Any) -> Any:
        x, dim = sample
        y = self.a(x)
        return torch.softmax(y, dim), y.sum(dim), torch.cat([y, y], dim)

    xs = [torch.randn(4, 4, requires_grad=True) for _ in dims]
    assert_equal(forward, list(zip(xs, dims, strict=True)), linear(), out="list")


def test_keepdim_and_defaults_are_told_apart() -> None:
    def forward(self: Any, sample: Any) -> Any:
        x, keep = sample
        return self.a(x).mean(1, keepdim=keep)

    xs = [torch.randn(1, 4) for _ in range(4)]
    assert_equal(forward, list(zip(xs, (True, False, False, True), strict=True)), linear(), out="list")


# Parameters


def test_a_tied_parameter_in_two_roles() -> None:
    embed = nn.Embedding(6, 4)
    out = nn.Linear(4, 6, bias=False)
    out.weight = embed.weight

    def forward(self: Any, words: Any) -> Any:
        h = sum(self.embed(w) for w in words)
        return self.out(h) + h @ self.embed.weight.t() + self.embed.weight[1].sum()

    words = [[torch.tensor(i) for i in w] for w in ((1, 2), (0,), (3, 5, 5))]
    assert_equal(forward, words, {"embed": embed, "out": out})


def test_a_shared_operand_that_is_a_row_of_a_batched_result() -> None:
    """The scores of a sentence are made against rows of a table that is computed once an instance."""

    def forward(self: Any, sample: Any) -> Any:
        x, i = sample
        table = self.a(x)
        row = table[i]
        return torch.stack([row @ r for r in table]) + self.b(row).sum()

    xs = [torch.randn(n, 4, requires_grad=True) for n in (2, 5, 3)]
    assert_equal(forward, list(zip(xs, (0, 3, -1), strict=True)), linear(), out="list")


def test_a_parameter_beside_a_constant_with_equal_contents() -> None:
    p = nn.Parameter(torch.ones(4))

    def forward(self: Any, x: Any) -> Any:
        return self.a(x) * self.p + self.a(x) * torch.ones(4, dtype=x.dtype)

    assert_equal(forward, vectors(4, 4), {**linear(), "p": p})


def test_two_parameters_with_equal_contents() -> None:
    one = nn.Linear(4, 4)
    two = nn.Linear(4, 4)
    two.load_state_dict(one.state_dict())

    def forward(self: Any, sample: Any) -> Any:
        x, first = sample
        return (self.one if first else self.two)(x)

    xs = vectors(4, 4, 4)
    assert_equal(forward, list(zip(xs, (True, False, True), strict=True)), {"one": one, "two": two})


def test_parameters_in_lists_and_dicts() -> None:
    parts = {
        "list": nn.ModuleList(nn.Linear(4, 4) for _ in range(3)),
        "table": nn.ParameterDict({k: nn.Parameter(torch.randn(4)) for k in "ab"}),
    }

    def forward(self: Any, sample: Any) -> Any:
        x, i, key = sample
        return self.list[i](x) * self.table[key]

    assert_equal(forward, list(zip(vectors(4, 4, 4, 4), (0, 1, 2, 0), "abab", strict=True)), parts)


# Results


RESULTS = {
    "an input": lambda self, x: x,
    "an input and a value": lambda self, x: (x, self.a(x)),
    "a constant": lambda self, x: (torch.ones(2, dtype=x.dtype), self.a(x)),
    "a parameter": lambda self, x: (self.a.weight, self.a(x)),
    "None": lambda self, x: None,
    "None beside a value": lambda self, x: (self.a(x), None),
    "a number": lambda self, x: (self.a(x), 3, 2.5, True, "text"),
    "the same value twice": lambda self, x: (lambda y: (y, y))(self.a(x)),
    "nested": lambda self, x: {"k": [self.a(x), (self.b(x), {"n": x.sum()})], "e": (), "d": {}},
    "nothing recorded": lambda self, x: torch.zeros(3),
    "a view of a parameter": lambda self, x: (self.a.weight[0], self.a(x)),
    "a view of an input": lambda self, x: (x[:2], self.a(x)[:2]),
    "detached": lambda self, x: (self.a(x).detach(), self.b(x)),
    "an empty list": lambda self, x: [],
    "a size": lambda self, x: (self.a(x).shape[0], self.a(x).numel()),
}


@pytest.mark.parametrize("backward", ["compiled", "autograd"])
@pytest.mark.parametrize("out", ["list", "stack"])
@pytest.mark.parametrize("name", RESULTS)
def test_what_instances_return(name: str, out: str, backward: str) -> None:
    made = model(RESULTS[name], linear(), out=out, backward=backward)
    xs = vectors(4, 4, 4)
    check_equal(made, xs)
    found, (eager,) = made(xs), [made.forward.__wrapped__(made, x) for x in xs[:1]]
    first = found[0] if out == "list" else found
    assert type(first) is type(eager) or isinstance(first, list | torch.Tensor)


def test_numbers_in_results_are_the_loops() -> None:
    made = model(lambda self, x: (self.a(x), len(x), None, "w"), linear(), out="list")
    for n, (_, length, nothing, text) in zip((4, 4), made(vectors(4, 4)), strict=True):
        assert (length, nothing, text) == (n, None, "w")


def test_results_of_different_structures() -> None:
    def forward(self: Any, x: Any) -> Any:
        y = self.a(x)
        return y if len(x.shape) == 1 else [y, {"b": y.sum()}]

    xs = [torch.randn(4), torch.randn(2, 4), torch.randn(4)]
    assert_equal(forward, xs, linear(), out="list")
    with pytest.raises(fxbatch.ResultError):
        model(forward, linear())(xs)
