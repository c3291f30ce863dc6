"""The options of Qwen3-Omni's codec decoder. ``omni.options`` has the talker's, ``SplitOptions`` are the thinker's."""

from __future__ import annotations

from typing import Literal

import msgspec

from omni_actors.stages.bounds import ChunkSizes, Dtype, Positive


class Code2WavOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of ``qwen3_code2wav``."""

    decode: Literal["exact", "reference"] = "exact"
    """exact: streams, with the samples of one forward over all frames. reference: decodes once all codes are there, in
    the chunks of the reference implementation."""
    chunk_frames: ChunkSizes = (2, 4, 8, 16, 25)
    """Frames in each output chunk, 12.5 a second."""
    max_batch: Positive = 1
    """Requests in one forward. Above 1, the last digits of a sample depend on the other requests of the batch."""
    dtype: Dtype = "float32"
