"""Records what a model of transformers passes to its own parts, and what they return."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Call:
    """One call of a method. result: None until it has returned, and if it raised."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None


@contextmanager
def recorded_calls(**methods: tuple[Any, str]) -> Iterator[dict[str, Call]]:
    """Record the last call of each method during the block.

    methods: by the key of its call in the yielded dict, an object and the name of its method. A method that was not
    called has no key there.
    """
    calls: dict[str, Call] = {}
    for key, (owner, name) in methods.items():
        setattr(owner, name, _recorded(key, getattr(owner, name), calls))
    try:
        yield calls
    finally:
        for owner, name in methods.values():
            delattr(owner, name)


def _recorded(key: str, method: Any, calls: dict[str, Call]) -> Any:
    @functools.wraps(method)  # transformers inspects signatures
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = calls[key] = Call(args, kwargs)
        call.result = method(*args, **kwargs)
        return call.result

    return wrapper
