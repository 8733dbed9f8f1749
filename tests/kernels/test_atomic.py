"""Counting and locking, in compiled code by several threads at once, and what the same means in plain Python."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from kernels import atomic, native
from kernels.dtypes import find
from kernels.executor import BLOCKED, DONE
from kernels.portable import bind
from kernels.targets import python

Functions = dict[str, Callable[..., int]]
THREADS, TIMES = 4, 3000


@pytest.fixture(params=["compiled", "python"])
def functions(request: pytest.FixtureRequest) -> Functions:
    names = ("fetch_add", "acquire", "release")
    if request.param == "compiled":
        return {name: native.load(name).call for name in names}
    plain = python.bodies(find("int32"), "sum")
    return {name: bind(getattr(atomic, name), plain, python.as_it_is) for name in names}


def together(work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_sum_returns_what_was_there_and_wraps(functions: Functions) -> None:
    words = np.array([7, 2**63 - 1, 7])
    add = functions["fetch_add"]
    assert [add(words.ctypes.data + 8, value) for value in (-3, 5, 0)] == [2**63 - 1, 2**63 - 4, -(2**63) + 1]
    assert words.tolist() == [7, -(2**63) + 1, 7]


def test_of_many_who_count_each_gets_a_number_of_its_own() -> None:
    word, add, got = np.zeros(1, np.int64), native.load("fetch_add").call, [[0]] * THREADS

    def count(number: int) -> None:
        got[number] = [add(word.ctypes.data, 1) for _ in range(TIMES)]

    together(count)
    assert sorted(number for numbers in got for number in numbers) == list(range(THREADS * TIMES))
    assert all(numbers == sorted(numbers) for numbers in got)


def test_a_lock_says_who_holds_it_and_lets_nobody_else_in(functions: Functions) -> None:
    words = np.zeros(8, np.int64)
    lock = words.ctypes.data
    assert functions["acquire"](lock, 3, 5, 5) == DONE
    assert words[0] == 3
    assert functions["acquire"](lock, 2, 5, 5) == BLOCKED
    assert functions["release"](lock) == DONE
    assert functions["acquire"](lock, 2, 5, 5) == DONE
    assert words.tolist() == [2] + [0] * 7


@pytest.mark.parametrize(("spins", "yields"), [(0, 0), (100, 20)])
def test_what_is_done_inside_is_not_torn(spins: int, yields: int) -> None:
    lock, shared = np.zeros(8, np.int64), np.zeros(2, np.int64)
    acquire, release = (native.load(name).call for name in ("acquire", "release"))

    def work(number: int) -> None:
        for _ in range(TIMES // 3):
            while acquire(lock.ctypes.data, number + 1, spins, yields) != DONE:
                pass
            seen = shared.tolist()
            shared[0] = seen[0] + 1
            shared[1] = seen[1] + 1
            release(lock.ctypes.data)

    together(work)
    assert shared.tolist() == [THREADS * (TIMES // 3)] * 2
    assert not lock.any()
