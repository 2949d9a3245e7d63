"""The largest entries of long rows, faster than sorting or partitioning them whole."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GROUP = 64


def shortlist(row: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.intp]:
    """Indices of at least the k largest entries of a row, in rising order.

    The row is cut into groups of 64 (strided, so that the maxima vectorise). The k-th largest
    group maximum is reached by at least k entries, so everything from there up contains the k
    largest; for real logits that is few entries more than k.

    Args:
        row: [m] float32 without NaN.
        k: at least 1.

    Returns:
        Rising indices; all of them when k >= m or the row is short.
    """
    m = len(row)
    groups = m // _GROUP
    if groups < 2 * k:
        if k >= m:
            return np.arange(m)
        return np.flatnonzero(row >= np.partition(row, m - k)[m - k])
    maxima = row[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
    return np.flatnonzero(row >= np.partition(maxima, groups - k)[groups - k])


def top_k(
    rows: npt.NDArray[np.float32], k: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]:
    """The k largest entries of each row of a short matrix.

    Args:
        rows: [n, m] float32, finite.
        k: at least 1; clipped to m.

    Returns:
        (indices [n, k], values [n, k]), each row in falling order of value; equal values in
        rising order of index.
    """
    m = rows.shape[1]
    k = min(k, m)
    if k == 1:
        at = rows.argmax(axis=1)[:, None]
    elif k <= 8:
        # A few argmax passes beat a partition of short rows.
        left, columns = rows.copy(), []
        every = np.arange(len(rows))
        for _ in range(k):
            best = left.argmax(axis=1)
            left[every, best] = -np.inf
            columns.append(best)
        at = np.stack(columns, axis=1)
    else:
        at = np.argsort(-rows, axis=1, kind="stable")[:, :k]
    return at, np.take_along_axis(rows, at, 1)
