"""How to use each engine: the cases of the conformance suite and of the tests of hostile requests."""

from __future__ import annotations

import pytest

from tests.support.engine_cases.case import Case, shown
from tests.support.engine_cases.images import (
    bagel,
    bagel_context,
    bagel_denoiser,
    diffusers,
    qwen_image_denoiser,
    qwen_image_text_encoder,
    qwen_image_vae_decoder,
    qwen_image_vae_encoder,
)
from tests.support.engine_cases.omni import (
    qwen2_5_talker,
    qwen2_5_thinker,
    qwen2_5_token2wav,
    qwen3_code2wav,
    qwen3_talker,
    qwen3_thinker,
)
from tests.support.engine_cases.voice import (
    echo,
    hibari_acoustic,
    hibari_vocoder,
    llm,
    llm_decode,
    llm_prefill,
    whisper,
)

__all__ = ["EVERY_ENGINE", "Case", "shown"]

EVERY_ENGINE = [
    pytest.param(echo, id="echo"),
    *(
        pytest.param(make, marks=pytest.mark.voice, id=make.__name__)
        for make in (
            whisper,
            llm,
            llm_prefill,
            llm_decode,
            hibari_acoustic,
            hibari_vocoder,
            qwen3_thinker,
            qwen3_talker,
            qwen3_code2wav,
            qwen2_5_thinker,
            qwen2_5_talker,
            qwen2_5_token2wav,
            qwen_image_denoiser,
            qwen_image_text_encoder,
            qwen_image_vae_encoder,
            qwen_image_vae_decoder,
            diffusers,
            bagel_context,
            bagel_denoiser,
            bagel,
        )
    ),
]
"""Parameters of a fixture: a function for each engine that makes its case. All but echo need the extra's libraries."""
