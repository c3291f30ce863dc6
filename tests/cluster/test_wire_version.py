"""The handshake's version stands for the messages of nodes and workers: other messages need another version."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec

from omni_actors.cluster.control import FromAgent, ToAgent
from omni_actors.cluster.handshake import VERSION
from omni_actors.protocol.messages import ControlMessage, WorkerSpec

MESSAGES = {6: "1c37c63abe2d6c5c"}
"""By version, a digest of all messages. When they change, increase ``VERSION``, and put its digest here."""


def described(kind: Any, seen: set[Any]) -> Iterator[str]:
    """Yield a line for each record that values of a type contain: its name, and its fields with their types.

    The types are as the source has them, so that each version of Python gives the same lines.
    """
    if kind in seen:
        return
    seen.add(kind)
    for part in get_args(kind):
        yield from described(part, seen)
    if isinstance(kind, type) and kind is not Any and hasattr(kind, "__annotations__"):
        yield f"{kind.__name__}: {kind.__annotations__}"
        for each in get_type_hints(kind).values():
            yield from described(each, seen)


def digest(*kinds: Any) -> str:
    seen = set[Any]()
    lines = sorted(line for kind in kinds for line in described(kind, seen))
    assert any(line.startswith("Start:") for line in lines)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def test_the_version_stands_for_the_messages() -> None:
    assert {VERSION: digest(FromAgent, ToAgent, ControlMessage)} == MESSAGES


def test_a_field_changes_the_digest() -> None:
    fields = list(get_type_hints(WorkerSpec).items())
    full, shorter = (msgspec.defstruct("WorkerSpec", each) for each in (fields, fields[1:]))
    assert digest(ControlMessage, full) != digest(ControlMessage, shorter)
