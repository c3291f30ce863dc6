"""The settings of turn detection, as clients send them: ``msgspec.convert(value, TurnDetection)`` checks one.

The names and defaults are those of OpenAI's realtime protocol (``session.audio.input.turn_detection``), except
``ignore_backchannels``, which is an extension.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

Eagerness: TypeAlias = Literal["low", "medium", "high", "auto"]


class _Settings(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """What both kinds have.

    Attributes:
        create_response: Whether the end of a turn starts a response.
        interrupt_response: Whether speech cuts the response that is being played.
        ignore_backchannels: Whether the response goes on if the user only says "yeah" or "mm-hm" (see ``BargeIn``).
    """

    create_response: bool = True
    interrupt_response: bool = True
    ignore_backchannels: bool = False


class ServerVad(_Settings, frozen=True, kw_only=True, tag="server_vad"):
    """A turn ends with a silence of a fixed length.

    Attributes:
        threshold: From which probability a window of sound counts as speech, from 0 to 1.
        prefix_padding_ms: How much sound before the speech belongs to the turn, in milliseconds.
        silence_duration_ms: How long a silence ends the turn, in milliseconds.
        idle_timeout_ms: After how much silence the user is asked to go on, in milliseconds. None: never.
    """

    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5
    prefix_padding_ms: Annotated[int, Meta(ge=0, le=10_000)] = 300
    silence_duration_ms: Annotated[int, Meta(ge=0, le=60_000)] = 500
    idle_timeout_ms: Annotated[int, Meta(ge=5_000, le=30_000)] | None = None


class SemanticVad(_Settings, frozen=True, kw_only=True, tag="semantic_vad"):
    """A turn ends when a model finds in a pause that the user has finished.

    Attributes:
        eagerness: How soon a response starts. It sets the probability from which a turn counts as finished, and the
            pause that ends a turn in any case: 8 s ("low"), 4 s ("medium", "auto") or 2 s ("high").
    """

    eagerness: Eagerness = "auto"


TurnDetection: TypeAlias = ServerVad | SemanticVad
"""Either kind; JSON tells them apart by ``type``."""
