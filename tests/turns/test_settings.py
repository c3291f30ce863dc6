"""The settings of turn detection accept what OpenAI's client may send, and refuse the rest."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from openai.types.realtime import realtime_audio_input_turn_detection as openai_types

from omni_actors.turns import SemanticVad, ServerVad, TurnDetection


@pytest.mark.parametrize("ours", [ServerVad, SemanticVad])
def test_the_settings_have_the_names_of_the_client(ours: type[msgspec.Struct]) -> None:
    theirs = getattr(openai_types, ours.__name__).model_fields
    assert {"type", *ours.__struct_fields__} == {*theirs, "ignore_backchannels"}


def test_either_kind_is_told_by_its_type() -> None:
    assert msgspec.convert({"type": "server_vad"}, TurnDetection) == ServerVad()
    assert msgspec.convert({"type": "semantic_vad", "eagerness": "low"}, TurnDetection) == SemanticVad(eagerness="low")


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"type": "other_vad"},
        {"type": "server_vad", "threshold": 1.5},
        {"type": "server_vad", "silence_duration_ms": -1},
        {"type": "server_vad", "silence_duration_ms": 10**9},
        {"type": "server_vad", "idle_timeout_ms": 1},
        {"type": "server_vad", "eagerness": "low"},
        {"type": "semantic_vad", "eagerness": "none"},
        {"type": "semantic_vad", "threshold": 0.5},
    ],
)
def test_what_is_out_of_range_or_unknown_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, TurnDetection)
