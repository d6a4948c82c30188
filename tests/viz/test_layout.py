"""Where boxes go: no overlaps, columns to the right, no needless crossings."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fxbatch.ir import Program
from fxbatch.viz.draw_program import draw_instances, draw_program
from fxbatch.viz.layout import crossings, keep_apart, place_in_columns
from fxbatch.viz.picture import Picture, SignatureKey
from tests.programs import programs, random_tree, tree_lstm_program


def overlaps(picture: Picture) -> list[tuple[str, str]]:
    boxes = picture.boxes
    return [
        (a.id, b.id)
        for i, a in enumerate(boxes)
        for b in boxes[i + 1 :]
        if a.x < b.x + b.w and b.x < a.x + a.w and a.y < b.y + b.h - 1e-6 and b.y < a.y + a.h - 1e-6
    ]


@given(programs())
def test_boxes_do_not_overlap_and_edges_lead_right(program: Program) -> None:
    picture = draw_program(program, SignatureKey.of(program))
    assert overlaps(picture) == []
    assert all(a.x1 < a.x2 for a in picture.arrows)
    assert all(b.x >= 0 and b.x + b.w <= picture.width and b.y + b.h <= picture.height for b in picture.boxes)


@given(programs())
def test_instances_do_not_overlap(program: Program) -> None:
    assert overlaps(draw_instances(program, SignatureKey.of(program))) == []


def test_a_tree_has_no_crossings() -> None:
    rng = random.Random(3)
    for leaves in (2, 5, 11, 24):
        program = tree_lstm_program([random_tree(rng, leaves)])
        picture = draw_instances(program, SignatureKey.of(program))
        xs = np.array([b.x + b.w / 2 for b in picture.boxes])
        column = np.unique(np.round(xs), return_inverse=True)[1]
        place = np.array([b.y for b in picture.boxes])
        source = np.array([a.source for a in picture.arrows])
        target = np.array([a.target for a in picture.arrows])
        assert crossings(column, place, source, target) == 0


def test_crossings_are_counted() -> None:
    column, place = np.array([0, 0, 1, 1]), np.array([0.0, 1.0, 0.0, 1.0])
    assert crossings(column, place, np.array([0, 1]), np.array([3, 2])) == 1
    assert crossings(column, place, np.array([0, 1]), np.array([2, 3])) == 0


@given(st.lists(st.tuples(st.floats(-50, 50), st.floats(1, 20)), min_size=1, max_size=12))
def test_keep_apart_keeps_order_and_gap(boxes: list[tuple[float, float]]) -> None:
    wish, height = np.array([b[0] for b in boxes]), np.array([b[1] for b in boxes])
    found = keep_apart(wish, height, 3.0)
    assert (np.diff(found) >= (height[1:] + height[:-1]) / 2 + 3.0 - 1e-9).all()
    free = keep_apart(found, height, 3.0)
    np.testing.assert_allclose(free, found, atol=1e-9)  # what is apart already stays


def test_nothing_has_no_places() -> None:
    none = np.zeros(0, np.int64)
    x, y = place_in_columns(none, none, none, none, none)
    assert len(x) == len(y) == 0
