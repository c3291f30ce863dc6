"""What vLLM can do beside requests: its caches, its sleep mode, and calls to its ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

from omni_actors.stages import weights
from omni_actors.stages.base import InvalidRequest


def capabilities(llm: Any) -> dict[str, Callable[..., Any] | str]:
    """Return the capabilities of an ``LLMEngine``, as ``stages.engine.Engine`` keeps them."""
    caches = llm.vllm_config.cache_config
    found: dict[str, Callable[..., Any] | str] = {
        "collective_rpc": partial(_collective_rpc, llm),
        "reset_mm_cache": "the engine takes text only",
        "reset_encoder_cache": "the engine takes text only",
        "reset_prefix_cache": "engine_args.enable_prefix_caching is false",
        "sleep": _why_no_sleep(llm) or partial(_sleep, llm),
        "wake_up": _why_no_sleep(llm) or llm.wake_up,
    }
    if caches.enable_prefix_caching:
        found["reset_prefix_cache"] = llm.reset_prefix_cache
    return found


def _why_no_sleep(llm: Any) -> str | None:
    if current_platform.is_cpu():
        return "vLLM moves no weights on a CPU, where they are in host memory; level 2 frees them"
    if not llm.model_config.enable_sleep_mode:
        return "engine_args.enable_sleep_mode is not set"
    return None


def why_no_new_weights(llm: Any) -> str | None:
    """Return why an ``LLMEngine`` cannot replace its weights; None: it can."""
    if llm.model_config.is_moe:
        return "vLLM 0.32.0 does not pack reloaded experts again"
    if llm.model_config.quantization is not None:
        return "vLLM's reload of quantized weights is not tested here"
    if llm.vllm_config.lora_config is not None:
        return "vLLM drops adapters when it reloads weights"
    return None


def replace_weights(llm: Any, own_directory: Path, part: str, files: weights.Files) -> dict[str, Any]:
    """Let vLLM load all weights again, from these files.

    part: the part of the checkpoint that the model is; "": all of it. vLLM reads whole checkpoints only.

    Returns as ``Engine._replace_weights`` does. Raises InvalidRequest: nothing has changed.
    """
    prefix = f"{part}." if part else ""
    checkpoint = weights.shapes(weights.checkpoint_files(own_directory))
    every = weights.shapes(files)
    weights.check(every, checkpoint)
    own, found = ({name for name in names if name.startswith(prefix)} for names in (checkpoint, every))
    if missing := sorted(own - found):
        message = f"vLLM replaces all weights, and the files lack {len(missing)}, such as {missing[0]!r}"
        raise InvalidRequest(message, param="path")
    with tempfile.TemporaryDirectory() as directory:  # vLLM reads all files of a directory
        for number, name in enumerate(files):
            Path(directory, f"{number}.safetensors").symlink_to(name)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": directory})
    if llm.model_config.is_multimodal_model:
        llm.reset_mm_cache()
        llm.reset_encoder_cache()
    return {"updated": len(found), "complete": True}


def _sleep(llm: Any, level: int) -> None:
    llm.sleep(level)


def _collective_rpc(
    llm: Any, method: str, timeout_s: float, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    try:
        results: list[Any] = llm.collective_rpc(method, timeout_s, tuple(args), dict(kwargs))
    except Exception as error:
        raise InvalidRequest(
            f"{method}: {type(error).__name__}: {error}", param="method", code="call_failed"
        ) from error
    return results
