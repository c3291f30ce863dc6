"""What vLLM can do beside requests: its caches, its sleep mode, and calls to its ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from vllm.platforms import current_platform

from omni_actors.stages.base import InvalidRequest


def capabilities(llm: Any) -> dict[str, Callable[..., Any] | str]:
    """Return the capabilities of an ``LLMEngine``, as ``stages.engine.Engine`` keeps them."""
    caches = llm.vllm_config.cache_config
    found: dict[str, Callable[..., Any] | str] = {
        "collective_rpc": partial(_collective_rpc, llm),
        "reset_mm_cache": llm.reset_mm_cache,
        "reset_encoder_cache": llm.reset_encoder_cache,
        "reset_prefix_cache": "engine_args.enable_prefix_caching is false",
        "update_weights": "vLLM reloads weights itself: collective_rpc('reload_weights')",
        "sleep": _why_no_sleep(llm) or partial(_sleep, llm),
        "wake_up": _why_no_sleep(llm) or llm.wake_up,
    }
    if caches.enable_prefix_caching:
        found["reset_prefix_cache"] = llm.reset_prefix_cache
    if not llm.model_config.is_multimodal_model:
        found |= dict.fromkeys(("reset_mm_cache", "reset_encoder_cache"), "the model takes text only")
    return found


def _why_no_sleep(llm: Any) -> str | None:
    if current_platform.is_cpu():
        return "vLLM moves no weights on a CPU, where they are in host memory; level 2 frees them"
    if not llm.model_config.enable_sleep_mode:
        return "engine_args.enable_sleep_mode is not set"
    return None


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
