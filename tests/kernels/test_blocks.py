"""NumPy arrays to 8-bit blocks and back: what `kernels/quantize.py` says of them, bit for bit."""

import numpy as np
import pytest

from kernels import blocks, quantize


@pytest.mark.parametrize("code", quantize.CODES)
@pytest.mark.parametrize(("count", "block"), [(0, 128), (128, 128), (4 * 1001, 4), (128 * 333, 128)])
def test_the_bits_of_numpy(code, count, block):
    x = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    if count:
        x[0], x[-1] = np.inf, 3.4e38
    packed = blocks.pack(x, block, code)
    np.testing.assert_array_equal(packed, quantize.pack(x, block, code))
    np.testing.assert_array_equal(blocks.unpack(packed, block, code), quantize.unpack(packed, block, code))
    np.testing.assert_array_equal(
        blocks.unpack(packed[len(packed) // 2 :], block, code), quantize.unpack(packed[len(packed) // 2 :], block, code)
    )
