"""Which state was the machine in? On made-up round trips whose truth is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.states import FAR, MIXED, NEAR, common_state, quartiles, state, threshold


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.9, 0.98])
@pytest.mark.parametrize(("near", "far"), [(100, 490), (150, 715), (430, 1100)])
def test_two_states_are_told_apart_whatever_their_share(near: float, far: float, share: float) -> None:
    random = np.random.default_rng()
    is_near = random.random(500) < share
    is_near[:2], is_near[2:4] = True, False
    trips = np.where(is_near, near, far) * random.lognormal(0, 0.08, 500)
    limit = threshold(trips)
    assert np.array_equal(trips < limit, is_near)


@given(st.floats(50, 200), st.integers(0, 1000))
def test_one_state_is_not_torn_in_two(centre: float, seed: int) -> None:
    trips = centre * np.random.default_rng(seed).lognormal(0, 0.05, 100)
    limit = threshold(trips)
    assert {state(trip, trip, limit) for trip in trips} == {NEAR if centre < 200 * 1.2 else FAR}


def test_one_state_is_named_by_what_is_usual() -> None:
    assert threshold([500.0] * 9) < 500 and threshold([100.0] * 9) > 100
    assert threshold([100.0]) == threshold([])  # too few to say


def test_a_sample_during_which_it_changed_is_mixed() -> None:
    assert state(100, 110, 250) == NEAR
    assert state(500, 480, 250) == FAR
    assert state(100, 480, 250) == state(480, 100, 250) == MIXED


def test_candidates_are_compared_where_the_worst_off_has_most_samples() -> None:
    ours, theirs = [NEAR] * 5 + [FAR] * 2, [NEAR] * 1 + [FAR] * 3
    assert common_state({"ours": ours, "theirs": theirs}) == FAR
    assert common_state({"ours": ours}) == NEAR
    assert common_state({"ours": ours, "theirs": theirs}, wanted=NEAR) == NEAR
    assert common_state({"ours": [MIXED], "theirs": [MIXED, MIXED]}) == MIXED


def test_quartiles() -> None:
    assert quartiles([5, 1, 3, 2, 4]) == (2, 3, 4)
    assert quartiles([7]) == (7, 7, 7)
