"""The pipelines of ``killed_omni`` and ``killed_voice`` with their language models on vLLM.

The numbers that vLLM draws are its own, so no reference follows a drawn token. Unless an answer is to equal the
undisturbed one, its tokens are greedy, and only a talker's codes are drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.killed_omni import Omni, checkpoint
from tests.support.killed_voice import Voice
from tests.support.vllm_options import ENGINE_ARGS
from tiny_models import vllm as tiny

SAVE: dict[str, Callable[..., Path]] = {
    "qwen3": functools.partial(tiny.qwen3, talker=True),
    "qwen2_5": tiny.qwen2_5,
}
TALKER_ARGS = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26, "max_num_batched_tokens": 32}


class OmniOnVLLM(Omni):
    """The thinker is on vLLM, and Qwen3-Omni's talker too. root: where the checkpoint is saved."""

    def __init__(self, configuration: str, family: str, root: Path) -> None:
        super().__init__(configuration, family, checkpoint(family, root, SAVE[family]))
        if configuration != "exact":
            self.sampled = {**self.sampled, "temperature": 0.0}  # type: ignore[misc]

    def engines(self) -> dict[str, tuple[str, dict[str, Any]]]:
        engines = super().engines()
        engines["thinker"] = f"vllm_{self.family}_thinker", {"engine_args": {**ENGINE_ARGS, "dtype": self.dtype}}
        if self.family == "qwen3":
            options = {"context": 1024, "prefill_chunk": 48, "dtype": self.dtype, "engine_args": TALKER_ARGS}
            engines["talker"] = "vllm_qwen3_talker", options
        return engines


class VoiceOnVLLM(Voice):
    """The language model is on vLLM."""

    name = "voice_vllm"

    def __init__(self, configuration: str) -> None:
        super().__init__(configuration)
        if configuration != "exact":
            self.sampled = self.greedy  # type: ignore[misc]

    def options(self) -> dict[str, Any]:
        return {"stages.llm.threads": 1, "stages.llm.options.engine_args.dtype": self.dtype}
