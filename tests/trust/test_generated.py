"""Generated programs and minibatches: batched equals the loop, under every schedule and mode."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.trust.generated import Case, Instance, Step, cases, check, interpret, parts
from tests.oracle import check_equal
from tests.trust.programs import model, vectors


@settings(max_examples=100)
@given(case=cases(max_instances=3, max_steps=5))
def test_generated_programs(case: Case) -> None:
    check(case)


def test_the_check_sees_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that gives something else when it is recorded fails."""

    def wrong(self: object, instance: Instance) -> object:
        found = interpret(self, instance)
        return [x * 1.001 if type(x).__name__ == "Value" else x for x in found]

    made = model(wrong, parts(), out="list")
    step = Step("unary", "tanh")
    with pytest.raises(AssertionError):
        check_equal(made, [Instance([Step("module", "linear"), step], vectors(4), 0, [], [-1])])
