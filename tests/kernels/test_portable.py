"""Portable functions: plain Python as they are, and another target's once bound."""

from collections.abc import Callable

import pytest

from kernels.portable import bind, portable, primitive

Function = Callable[..., int]


@primitive
def twice(value: int) -> int:
    return 2 * value


@primitive
def never_given(value: int) -> int:
    raise LookupError("bound by nobody")


@portable
def inner(value: int, plus: int = 1) -> int:
    return twice(value) + plus


@portable
def outer(value: int) -> int:
    return inner(value) + inner(value, 0)


@portable
def lacking(value: int) -> int:
    return never_given(value)


def ordinary(value: int) -> int:
    return twice(value)


@portable
def calls_ordinary(value: int) -> int:
    return ordinary(value)


def as_it_is(function: Function) -> Function:
    return function


def test_unbound_a_portable_function_is_python() -> None:
    assert outer(3) == 13


def test_binding_replaces_primitives_in_callees_too_and_leaves_the_source_alone() -> None:
    bound = bind(outer, {"twice": lambda value: 10 * value}, as_it_is)
    assert bound(3) == 61
    assert outer(3) == 13


def test_each_function_is_compiled_once_and_callees_before_callers() -> None:
    compiled: list[str] = []

    def jit(function: Function) -> Function:
        compiled.append(function.__name__)
        return function

    bind(outer, {"twice": twice}, jit)
    assert compiled == ["inner", "outer"]


def test_defaults_and_names_survive() -> None:
    bound = bind(inner, {"twice": twice}, as_it_is)
    assert (bound(1), bound(1, 5), bound.__name__, bound.__module__) == (3, 7, "inner", inner.__module__)


def test_two_bindings_do_not_disturb_each_other() -> None:
    tens = bind(outer, {"twice": lambda value: 10 * value}, as_it_is)
    hundreds = bind(outer, {"twice": lambda value: 100 * value}, as_it_is)
    assert (tens(1), hundreds(1)) == (21, 201)


def test_functions_that_are_not_portable_are_left_as_they_are() -> None:
    assert bind(calls_ordinary, {"twice": lambda value: 0}, as_it_is)(4) == 8


def test_a_primitive_without_a_body_is_named() -> None:
    with pytest.raises(LookupError, match="lacking uses the primitive never_given, which this target lacks"):
        bind(lacking, {"twice": twice}, as_it_is)
