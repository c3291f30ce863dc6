"""The engines as a worker opens them, and what vLLM finds when it is imported there.

Rules
1. vLLM's own settings are environment variables, which it reads as it is imported: they come first.
2. One process: no engine in a second one, no model looked at in a third, so a worker's death leaves nothing.
3. It asks no hub, and reports to nobody.
"""

from __future__ import annotations

import os

from omni_actors.stages import assets
from omni_actors.stages.base import StageContext, StageEngine

__all__ = ["open_qwen2_5_thinker", "open_qwen3_talker", "open_qwen3_thinker", "open_text", "prepare"]

FIXED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # hidden states are read off the first one
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
DEFAULT = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # the end of stderr is kept to explain a crash
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the pipeline's other workers are on these cores too
}


def prepare(context: StageContext) -> None:
    """Call before vLLM is imported."""
    os.environ.update(FIXED)
    for name, value in DEFAULT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(assets.cache_dir() / "torchinductor"))
    kind, _, index = context.device.partition(":")
    if kind == "cuda" and index:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(index)] if visible else index


def open_text(context: StageContext) -> StageEngine:
    """Text to text. ``context.model``: a checkpoint directory. Nothing is downloaded. Raises as ``VLLMEngine`` does."""
    prepare(context)
    from omni_actors.stages.vllm.text import TextEngine

    return TextEngine(context)


def open_qwen3_thinker(context: StageContext) -> StageEngine:
    """Qwen3-Omni's thinker, for its talker. ``context.model``: a whole checkpoint's directory."""
    prepare(context)
    from omni_actors.stages.vllm.qwen3_thinker import Qwen3Thinker

    return Qwen3Thinker(context)


def open_qwen3_talker(context: StageContext) -> StageEngine:
    """Qwen3-Omni's talker. ``context.model``: a whole checkpoint's directory."""
    prepare(context)
    from omni_actors.stages.vllm.qwen3_talker import Qwen3Talker

    return Qwen3Talker(context)


def open_qwen2_5_thinker(context: StageContext) -> StageEngine:
    """Qwen2.5-Omni's thinker, for its talker. ``context.model``: a whole checkpoint's directory."""
    prepare(context)
    from omni_actors.stages.vllm.qwen2_5_thinker import Qwen25Thinker

    return Qwen25Thinker(context)
