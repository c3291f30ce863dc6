"""What a detector finds in a stream of sound. All times are positions in that stream, in milliseconds."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class SpeechStarted(msgspec.Struct, frozen=True):
    """The user began to speak.

    Attributes:
        at_ms: Where the turn's sound begins: the start of the speech, less the prefix padding.
        speech_ms: Where the speech itself begins.
    """

    at_ms: int
    speech_ms: int


class SpeechStopped(msgspec.Struct, frozen=True):
    """The user's turn ended.

    Attributes:
        at_ms: Where the turn's sound ends: the position at which the detector found the end. The silence that it waited
            for is included.
        speech_ms: Where the speech itself ends.
    """

    at_ms: int
    speech_ms: int


class IdleTimeout(msgspec.Struct, frozen=True):
    """The user did not speak for ``ServerVad.idle_timeout_ms`` (see ``Detector.expect_speech``).

    Attributes:
        start_ms: Where the wait began.
        at_ms: Where it ended.
    """

    start_ms: int
    at_ms: int


Event: TypeAlias = SpeechStarted | SpeechStopped | IdleTimeout
"""What ``Detector.feed`` returns."""
