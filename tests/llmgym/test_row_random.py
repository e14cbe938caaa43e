"""Random streams of rows: independent of block size and of other rows, and well distributed."""

import numpy as np
from countdown import assert_same

from llmgym.row_random import RowRandom


def test_streams_do_not_depend_on_the_block_or_on_other_rows():
    wide, narrow = RowRandom(4, block=128), RowRandom(4, block=1)
    for row in range(4):
        wide.seed(row, 30 + row)
        narrow.seed(row, 30 + row)
    rows = np.arange(4)
    for step in range(300):
        some = rows[step % 3 :]
        assert_same(wide.uniform(some), narrow.uniform(some))
        assert_same(wide.normal(some), narrow.normal(some))
    row_2 = np.random.Generator(np.random.PCG64(32))
    fresh = RowRandom(4)
    fresh.seed(2, 32)
    drawn = [fresh.uniform(np.array([2]))[0] for _ in range(200)]
    np.testing.assert_array_equal(drawn, row_2.random(200))


def test_distributions():
    random = RowRandom(2000)
    for row in range(2000):
        random.seed(row, row)
    rows = np.arange(2000)
    normal = np.concatenate([random.normal(rows) for _ in range(100)])
    assert abs(normal.mean()) < 0.01 and abs(normal.std() - 1) < 0.01
    assert abs((normal**3).mean()) < 0.03 and abs((normal**4).mean() - 3) < 0.06
    integers = np.concatenate([random.integers(rows, 7) for _ in range(100)])
    np.testing.assert_allclose(np.bincount(integers, minlength=7) / 2e5, 1 / 7, atol=0.005)
