"""One source, several targets.

A function marked `@portable` is ordinary Python that calls other portable functions and *primitives*. A
primitive (`@primitive`) is a name with one body per target: atomics, fences, wide loads. Called as they
are, both run as Python, which is what the CUDA simulator does. `bind` makes the same source a function of
another target: it copies the function with every primitive's name bound to that target's body, portable
callees first, and hands each copy to the target's `jit`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_portable: set[FunctionType] = set()
_primitives: set[FunctionType] = set()


def portable(function: Function) -> Function:
    """Mark a function as written for every target: integers, flat control flow, primitives."""
    _portable.add(function)  # type: ignore[arg-type]
    return function


def primitive(function: Function) -> Function:
    """Mark a name whose meaning each target gives; the decorated body is the Python one."""
    _primitives.add(function)  # type: ignore[arg-type]
    return function


def bind(
    function: Callable[..., Any],
    bodies: Mapping[str, Any],
    jit: Callable[[FunctionType], Any],
    done: dict[FunctionType, Any] | None = None,
) -> Any:
    """`function` for one target: primitives replaced by `bodies`, everything compiled by `jit`.

    `done`: copies made before with the same bodies; they are used again, and new ones are added. Raises LookupError for
    a primitive that the target gives no body for.
    """
    done = {} if done is None else done

    def copy(source: FunctionType) -> Any:
        if source not in done:
            names = dict(source.__globals__)
            for name in source.__code__.co_names:
                value = names.get(name)
                if not isinstance(value, FunctionType):
                    continue
                if value in _primitives:
                    if name not in bodies:
                        raise LookupError(f"{source.__name__} uses the primitive {name}, which this target lacks")
                    names[name] = bodies[name]
                elif value in _portable:
                    names[name] = copy(value)
            bound = FunctionType(source.__code__, names, source.__name__, source.__defaults__, source.__closure__)
            bound.__module__ = source.__module__
            done[source] = jit(bound)
        return done[source]

    assert isinstance(function, FunctionType)
    return copy(function)
