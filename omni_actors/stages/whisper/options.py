"""The options and request parameters of the ``whisper`` engine."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from omni_actors.stages.bounds import Name, Positive


class WhisperOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of ``whisper``."""

    compute_type: str = "int8"
    """The number format of the weights, by CTranslate2's names."""
    beam_size: Positive = 1
    """Hypotheses of the beam search; 1 is greedy."""


class WhisperParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request parameters of ``whisper``."""

    language: Name | None = None
    """A language code such as "en". None: the model detects the language."""
    task: Literal["transcribe", "translate"] = "transcribe"
    """What the text is: that of the recording, or its translation to English, of models of several languages."""
    initial_prompt: Annotated[str, Meta(max_length=4096)] = ""
    """Text before the recording, whose words and style the model prefers in its first 30 s."""
    timestamps: Literal["segment", "word"] | None = None
    """Whether outputs have their times: of segments, or of words too."""
