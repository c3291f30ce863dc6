"""The options and request parameters of the ``hibari`` engines."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from omni_actors.stages.bounds import ChunkSizes, Seed


class AcousticOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of ``hibari_acoustic``."""

    chunk_frames: ChunkSizes = (40, 80, 160)
    """Frames in each output chunk of a sentence, 80 a second."""


class AcousticParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request parameters of ``hibari_acoustic``."""

    speed: Annotated[float, Meta(ge=0.25, le=4)] = 1.0
    """Speaking rate, as a factor."""


class VocoderParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request parameters of ``hibari_vocoder``."""

    seed: Seed = 0
    """Seed of the noise in the voice."""
