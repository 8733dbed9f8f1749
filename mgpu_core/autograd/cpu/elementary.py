"""exp, tanh and sigmoid for compiled loops, in float32 and float64, written so that a loop becomes vector instructions.

exp(x) = 2^n exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2, where a short Taylor polynomial is exact to rounding
(Cody and Waite 1980). Everything is within 1.5 units in the last place, and NaN stays NaN.

Numba's cache does not see that kernels in other files contain this code: after a change here, remove `__pycache__`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.extending import overload


def exp(x: Any) -> Any:
    """e to the power x; 0 where that is less than the smallest normal number."""
    return np.exp(x)


def tanh(x: Any) -> Any:
    """The hyperbolic tangent, to full relative accuracy for small x too."""
    return np.tanh(x)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


def _functions(
    real: Any, integer: Any, mantissa: int, bias: int, ln2: tuple[float, float], least: float, most: float
) -> dict[str, Callable[..., Any]]:
    """The functions for one dtype: its bits, ln 2 in two parts so that n times the first is exact, the range of exp."""
    strict = numba.njit(error_model="numpy", fastmath={"contract"})  # reordered, the two parts would become one again
    magic = real(1.5 * 2.0**mantissa)  # adding it rounds to an integer, which is then in the low bits
    shift, bias = integer(mantissa), integer(bias)
    inverse, high, low = real(1 / math.log(2)), real(ln2[0]), real(ln2[1])
    least, most = real(least), real(most)
    zero, one, two, flat, infinity = real(0), real(1), real(2), real(20), real(math.inf)
    c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12, c13 = (real(1 / math.factorial(k)) for k in range(2, 14))
    double = real is np.float64

    @strict
    def parts(x: Any) -> Any:
        """(2^n, exp(r) - 1)."""
        shifted = x * inverse + magic
        n = shifted - magic
        power = integer((real(shifted).view(integer) + bias) << shift).view(real)
        r = (x - n * high) - n * low
        tail = c7
        if double:
            tail += r * (c8 + r * (c9 + r * (c10 + r * (c11 + r * (c12 + r * c13)))))
        return power, r * (one + r * (c2 + r * (c3 + r * (c4 + r * (c5 + r * (c6 + r * tail))))))

    @strict
    def exp(x: Any) -> Any:
        power, fraction = parts(least if x < least else most if x > most else x)
        y = power * fraction + power
        return zero if x < least else infinity if x > most else y

    @strict
    def tanh(x: Any) -> Any:
        power, fraction = parts(two * (-flat if x < -flat else flat if x > flat else x))
        y = power * fraction + (power - one)  # exp(2 x) - 1
        return y / (y + two)

    @strict
    def sigmoid(x: Any) -> Any:
        return one / (one + exp(-x))

    return {"exp": exp, "tanh": tanh, "sigmoid": sigmoid}


_BY_TYPE = {
    numba.float32: _functions(np.float32, np.int32, 23, 127, (0.693359375, -2.12194440e-4), -87.3, 88.3),
    numba.float64: _functions(
        np.float64, np.int64, 52, 1023, (6.93147180369123816490e-01, 1.90821492927058770002e-10), -708.0, 709.0
    ),
}


def _compile(function: Callable[..., Any]) -> None:
    @overload(function)
    def choose(x: Any) -> Callable[..., Any] | None:
        if x not in _BY_TYPE:
            return None
        chosen = _BY_TYPE[x][function.__name__]

        def call(x: Any) -> Any:
            return chosen(x)

        return call


for _function in (exp, tanh, sigmoid):
    _compile(_function)
