"""A fault-tolerant runtime for omni-modality models: supervised worker processes joined by shared-memory rings.

A name is imported when it is first used, so that a worker process imports only what it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omni_actors.config import Pipeline
    from omni_actors.errors import (
        ConfigError,
        DeadlineExceeded,
        InvalidRequest,
        OmniError,
        Overloaded,
        RequestError,
        StageCrashed,
        StageUnavailable,
        Unsupported,
    )
    from omni_actors.generation import Generation
    from omni_actors.generations import Generations
    from omni_actors.media import VideoClip
    from omni_actors.outputs import Answer, AudioChunk, Output, Picture
    from omni_actors.prompts import EmbedsPrompt, TextPrompt, TokensPrompt
    from omni_actors.system import OmniSystem, Reply

__version__ = "0.1.0"
__all__ = [
    "Answer",
    "AudioChunk",
    "ConfigError",
    "DeadlineExceeded",
    "EmbedsPrompt",
    "Generation",
    "Generations",
    "InvalidRequest",
    "OmniError",
    "OmniSystem",
    "Output",
    "Overloaded",
    "Picture",
    "Pipeline",
    "Reply",
    "RequestError",
    "StageCrashed",
    "StageUnavailable",
    "TextPrompt",
    "TokensPrompt",
    "Unsupported",
    "VideoClip",
]

_HOME = {
    **dict.fromkeys(("Answer", "AudioChunk", "Output", "Picture"), "omni_actors.outputs"),
    "Generation": "omni_actors.generation",
    **dict.fromkeys(("ConfigError", "OmniError", "RequestError"), "omni_actors.errors"),
    **dict.fromkeys(("DeadlineExceeded", "InvalidRequest", "Overloaded", "Unsupported"), "omni_actors.errors"),
    **dict.fromkeys(("StageCrashed", "StageUnavailable"), "omni_actors.errors"),
    **dict.fromkeys(("OmniSystem", "Reply"), "omni_actors.system"),
    "Generations": "omni_actors.generations",
    **dict.fromkeys(("EmbedsPrompt", "TextPrompt", "TokensPrompt"), "omni_actors.prompts"),
    "Pipeline": "omni_actors.config",
    "VideoClip": "omni_actors.media",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
