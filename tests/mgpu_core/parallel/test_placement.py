"""Parts know where they lie in the whole."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mgpu_core.parallel import Placement
from mgpu_core.parallel.placement import even_part


@st.composite
def placements(draw):
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
    axis = draw(st.integers(0, len(shape) - 1))
    pairs = st.tuples(st.integers(0, shape[axis]), st.integers(0, shape[axis])).map(sorted).map(tuple)
    return Placement(shape, axis, tuple(draw(st.lists(pairs, max_size=3))))


@given(placements())
def test_runs_are_the_index_and_as_long_as_they_can_be(placement):
    whole = np.arange(np.prod(placement.shape)).reshape(placement.shape)
    part = whole[placement.index]
    assert part.shape == placement.local_shape
    flat = np.full(part.size, -1)
    ends = []
    for here, there, count in placement.runs():
        assert count > 0
        flat[here : here + count] = whole.ravel()[there : there + count]
        assert not ends or ends[-1] != there
        ends.append(there + count)
    np.testing.assert_array_equal(flat, part.ravel())


def test_parts_of_all_ranks_make_up_the_whole():
    for count in (0, 1, 2, 5, 6):
        for size in (1, 2, 3, 4):
            whole = np.full((2, count), -1)
            for rank in range(size):
                placement = Placement((2, count), 1, (even_part(count, rank, size),))
                whole[placement.index] = rank
            assert (whole >= 0).all()
            assert np.ptp(np.bincount(whole[0], minlength=size)) <= 1 if count else True


def test_a_scattered_part():
    """Queries, keys and values of one of two heads: rows of three blocks."""
    placement = Placement((12, 2), 0, ((2, 4), (6, 8), (10, 12)))
    assert placement.local_shape == (6, 2)
    assert list(placement.runs()) == [(0, 4, 4), (4, 12, 4), (8, 20, 4)]
