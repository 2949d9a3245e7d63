"""The largest entries of rows, against sorting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from localspec.topk import shortlist, top_k

ties = st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 7.5])  # few values: ties are everywhere
wide = st.floats(-1e6, 1e6, width=32)
numbers = ties | wide


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 20)), elements=numbers),
    st.integers(1, 25),
)
def test_top_k_is_a_stable_sort(rows, k):
    at, values = top_k(rows, k)
    expected = np.argsort(-rows, axis=1, kind="stable")[:, :k]
    assert at.tolist() == expected.tolist()
    np.testing.assert_array_equal(values, np.take_along_axis(rows, expected, 1))


def test_top_k_leaves_its_input_alone():
    rows = np.array([[3.0, 1.0, 2.0]], np.float32)
    top_k(rows, 2)
    assert rows.tolist() == [[3.0, 1.0, 2.0]]


def check_shortlist(row: np.ndarray, k: int) -> np.ndarray:
    found = shortlist(row, k)
    assert (np.diff(found) > 0).all()
    assert len(found) >= min(k, len(row))
    left_out = np.delete(row, found)
    assert not len(left_out) or left_out.max() < row[found].min()
    return found


@given(hnp.arrays(np.float32, st.integers(1, 300), elements=numbers), st.integers(1, 320))
def test_a_shortlist_holds_the_largest(row, k):
    found = check_shortlist(row, k)
    if len(row) < 128 * k:  # no groups: exactly what reaches the k-th largest
        kth = np.sort(row)[-min(k, len(row))]
        assert found.tolist() == np.flatnonzero(row >= kth).tolist()


@given(
    st.integers(128, 1500),
    st.integers(1, 8),
    st.lists(st.integers(0, 1499), max_size=12),
    st.integers(0, 2**32 - 1),
)
def test_long_rows_cut_into_groups(m, k, peaks, seed):
    row = np.random.default_rng(seed).integers(-5, 5, m).astype(np.float32)
    row[[p for p in peaks if p < m]] += 20
    check_shortlist(row, k)


@pytest.mark.parametrize("m", [64 * 6, 64 * 6 + 1, 64 * 6 + 63])
def test_the_largest_may_share_a_group_or_lie_in_the_remainder(m):
    for start in (0, 5, m - 3 * 6 - 1):
        row = np.zeros(m, np.float32)
        peaks = [start, start + 6, start + 18]  # 6 groups: these three lie in one
        row[peaks] = 1, 2, 3
        assert set(peaks) <= set(check_shortlist(row, 3).tolist())
    row = np.zeros(m, np.float32)
    row[-3:] = 1, 2, 3
    assert {m - 3, m - 2, m - 1} <= set(check_shortlist(row, 3).tolist())


def test_a_shortlist_of_real_looking_logits_is_short():
    row = np.random.default_rng(0).normal(size=49152).astype(np.float32)
    assert 128 <= len(check_shortlist(row, 128)) < 256
