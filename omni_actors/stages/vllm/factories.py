"""Factories of the engines on vLLM. They set the environment of vLLM before they import it.

Rules
1. vLLM's settings are environment variables, which vLLM reads when it is imported. So they are set first.
2. vLLM runs in the worker's process and starts no other, so a worker's death leaves nothing behind. Only a worker that
   spans several devices has processes of vLLM, one for each device, which end when the worker's pipes to them close.
3. vLLM contacts no model hub and sends no usage statistics.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module

from omni_actors.stages import assets
from omni_actors.stages.base import StageContext, StageEngine

REQUIRED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the hidden states are captured from version 1
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_REGEX_COMPILATION_TIMEOUT_S": "0",  # vLLM's threads would go on uncounted; ``structures`` has limits
}
DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # the supervisor keeps the end of stderr to explain a crash
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other workers of the pipeline use the same cores
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # torch leaves them in TMPDIR, wherever its cache is
}


def prepare_environment(context: StageContext) -> None:
    """Set vLLM's environment variables in this process. Call it before vLLM is imported."""
    os.environ.update(REQUIRED)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(assets.cache_dir() / "torchinductor"))


def _factory(module: str, engine: str) -> Callable[[StageContext], StageEngine]:
    def open_engine(context: StageContext) -> StageEngine:
        prepare_environment(context)
        opened: StageEngine = getattr(import_module(f"omni_actors.stages.vllm.{module}"), engine)(context)
        return opened

    return open_engine


open_text = _factory("roles", "open_text")
open_qwen3_thinker = _factory("qwen3_thinker", "Qwen3Thinker")
open_qwen3_talker = _factory("qwen3_talker", "Qwen3Talker")
open_qwen2_5_thinker = _factory("qwen2_5_thinker", "Qwen25Thinker")
