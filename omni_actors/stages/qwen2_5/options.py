"""The options and request parameters of Qwen2.5-Omni's talker and codec decoder."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from omni_actors.stages.bounds import Name, Positive, Seed, Tokens, TopK, TopP
from omni_actors.stages.omni.options import TalkerOptions, TalkerParams


class Qwen25TalkerOptions(TalkerOptions, frozen=True, forbid_unknown_fields=True):
    """The options of ``qwen2_5_talker``."""

    prompt: Literal["reference", "trained"] = "reference"
    """reference: the prompt of transformers 5.23; the codes are the same. trained: the prompt of the model's authors,
    which adds the embeddings of the codec's pad and bos, and positions on three axes."""


class Qwen25TalkerParams(TalkerParams, frozen=True, forbid_unknown_fields=True):
    """The defaults are those of the model's authors."""

    talker_max_tokens: Tokens = 4096
    """Codes of speech."""
    talker_top_k: TopK = 40
    talker_top_p: TopP = 0.8


class Token2WavOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of ``qwen2_5_token2wav``."""

    decode: Literal["exact", "reference"] = "exact"
    """exact: streams, 9.1 s of speech later than the codes, with the samples of all codes decoded together. reference:
    decodes all codes together once they are there, bit for bit as the reference implementation."""
    chunk_blocks: Positive = 2
    """Blocks in each output chunk; a block is 0.24 s of speech."""
    steps: Annotated[int, Meta(ge=2)] = 10
    """Time points of the ODE solver. Fewer are less accurate and faster, and output follows the codes more closely."""


class Token2WavParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request parameters of ``qwen2_5_token2wav``."""

    speaker: Name | None = None
    """A speaker of the checkpoint, in upper or lower case. None: its default. The talker gets the same parameter."""
    seed: Seed | None = None
    """Seed of the noise from which the decoder makes the sound."""
