"""Writes docs/api.md: what each engine can do (``matrix.json``), and where users of vLLM's engine client find it here.

`python -m tests.api.document` writes the file. A test compares it with what this module would write.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.capability_matrix import MATRIX
from tests.support.capability_probes import CAPABILITIES

NOT_ASKED = "–"
FILE = Path(__file__).parents[2] / "docs/api.md"

INTRODUCTION = """\
# What each engine can do

<!-- Written by `python -m tests.api.document`; tests/api tries each cell on the real engine. -->

A capability works, or it raises `Unsupported` with the stage, the capability and the reason. Nothing here is accepted
and ignored. A letter in a table stands for the system's reason, below the table; "–": the question makes no sense for
the engine, since it reads no prompts, for example. A row with options is the engine with these. The methods are those
of `OmniSystem`; `sync.Omni` and `aio.AsyncOmni` have them too.
"""

METHODS = """\
## For users of vLLM's engine client

| `EngineClient` of vLLM 0.32 | here |
|---|---|
"""

OURS: Mapping[str, str] = {
    "generate": "`generate`",
    "encode": "`encode`",
    "abort": "`abort`; awaiting it returns what was freed",
    "is_running, errored, dead_error": "`is_running`, `errored`, `dead_error`",
    "is_stopped, shutdown": "`is_stopped`, `shutdown`",
    "check_health": "`check_health`, `health`",
    "check_admission, get_status": "`generate` raises `Overloaded` with `retry_after_s`; `health`",
    "pause_generation, resume_generation, is_paused": "the same names",
    "sleep, wake_up, is_sleeping": "the same names",
    "scale_elastic_ep": "`scale`, which changes the number of a stage's replicas",
    "add_lora (remove_lora, list_loras, pin_lora)": "the same names",
    "reset_prefix_cache, reset_mm_cache, reset_encoder_cache": "the same names",
    "update_weights, start_weight_update, finish_weight_update": "the same names",
    "start_profile, stop_profile": "the same names",
    "collective_rpc": "`collective_rpc`; `call` for the capabilities that engines declare",
    "get_supported_tasks, model_config, get_tokenizer": "the same names",
    "is_tracing_enabled, do_log_stats": "the same names",
    "get_weight_version": "`get_weight_version`, by stage; every output has it as `weights_version`",
    "update_weight_version": "none: a version is named by the `update_weights` that brings it",
    "compute_weight_checksums": "none: `update_weights` checks size and time of the files that each worker loads",
    "init_weight_transfer_engine, shutdown_weight_transfer_engine": "not needed: `update_weights` takes the tensors",
    "start_draft_weight_update": "none: `update_weights` replaces no weights of vLLM's draft models",
    "release_kv_cache_memory": "none by itself: `sleep` frees it, with the weights",
    "get_kv_event_sources": "none: the engines publish no events of their caches; `/metrics` has hit rates",
    "notify_kv_transfer_request_rejected": "not needed: a stage that prefills keeps no blocks for the one that decodes",
    "handle_fault": "not needed: workers are supervised and restarted; `health` has their deaths",
}
"""By method of ``EngineClient`` of vLLM 0.32, ours. Those in parentheses are methods of its implementation."""


def tables(matrix: Mapping[str, Mapping[str, str | None]]) -> Iterator[str]:
    """Yield the lines of a table for each group of capabilities."""
    for group, capabilities in CAPABILITIES.items():
        reasons: dict[str, str] = {}
        yield f"## {group}\n"
        yield f"| engine | {' | '.join(capabilities)} |"
        yield "|---" * (1 + len(capabilities)) + "|"
        for engine, found in matrix.items():
            cells = []
            for name in capabilities:
                why = found.get(name, NOT_ASKED)
                if why is not None and why != NOT_ASKED:
                    why = reasons.setdefault(why, chr(ord("a") + len(reasons)))
                cells.append(why or "works")
            yield f"| {engine} | {' | '.join(cells)} |"
        yield ""
        for why, letter in reasons.items():
            yield f"- {letter}: {why}"
        if reasons:
            yield ""
        yield "| capability | call |"
        yield "|---|---|"
        for name, capability in capabilities.items():
            yield f"| {name} | {capability.how} |"
        yield ""


def text() -> str:
    """Return what docs/api.md should contain."""
    rows = [f"| {theirs} | {ours} |" for theirs, ours in OURS.items()]
    return "\n".join([INTRODUCTION, *tables(json.loads(MATRIX.read_text())), METHODS + "\n".join(rows)]) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
