"""Learning rates: pure functions of the step."""

import math

import pytest

from mgpu_core import schedule


def test_warm_up_is_linear_and_ends_at_the_peak():
    for rate in (
        schedule.constant(0.4, warmup=4),
        schedule.cosine(0.4, steps=20, warmup=4),
        schedule.step_decay(0.4, boundaries=[10], warmup=4),
    ):
        assert [rate(step) for step in range(5)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])


def test_constant():
    assert {schedule.constant(0.1)(step) for step in (0, 5, 10**9)} == {0.1}


def test_cosine():
    rate = schedule.cosine(1.0, steps=110, warmup=10, final=0.2)
    assert rate(10) == 1.0
    assert rate(60) == pytest.approx(0.6)
    assert rate(35) == pytest.approx(0.2 + 0.4 * (1 + math.cos(math.pi / 4)))
    assert rate(110) == rate(10_000) == pytest.approx(0.2)
    rates = [rate(step) for step in range(10, 111)]
    assert rates == sorted(rates, reverse=True)
    assert schedule.cosine(1.0, steps=4, warmup=4)(4) == 1.0


def test_step_decay():
    rate = schedule.step_decay(1.0, boundaries=[3, 5], factor=0.5)
    assert [rate(step) for step in range(7)] == [1, 1, 1, 0.5, 0.5, 0.25, 0.25]


def test_linear_scaling():
    assert schedule.linear_scaling(0.1, 256, 8192) == pytest.approx(3.2)
    assert schedule.linear_scaling(0.1, 256, 64) == pytest.approx(0.025)
