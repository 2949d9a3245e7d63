"""What a deterministic generation needs beyond decisions that do not follow the clock.

The same tokens come out every time when every pass has the same rows over the same cells. So it
starts from empty KV caches (what an earlier generation left would have other cells and other
rounding), from a fresh policy, and keeps to passes of one kernel family.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from localspec.tree import DraftTree

if TYPE_CHECKING:
    from localspec.engine import Engine

_DEPTH = 32
_ROWS = (2, 8)


def single_rows_differ(engine: Engine) -> bool:
    """Whether a pass of one row rounds differently from passes of several.

    Compares the bits of one token's logits, alone and first of 2 and of 8 rows. Where they are
    equal (e.g. flash attention on a CPU with one thread), plain rounds need no second row. The
    KV caches are empty afterwards.
    """
    target = engine._target
    tokens = [(7 * i + 1) % engine.model.n_vocab for i in range(_DEPTH + max(_ROWS))]
    if engine.n_ctx < len(tokens):
        return True
    engine._live.clear()
    found = []
    for rows in (1, *_ROWS):
        for _ in target.prefill(tokens[:_DEPTH]):
            pass
        tree = DraftTree.chain(tokens[_DEPTH + 1 : _DEPTH + rows])
        found.append(np.array(target.verify(tokens[_DEPTH], tree)[0]))
        target.cut(0)
    engine._live.clear()
    return any(not np.array_equal(found[0], other) for other in found[1:])
