"""What a running system tells of its pipeline: tokenizers, model configurations, tasks, and a line of statistics."""

from __future__ import annotations

import functools
import json
import logging
import pkgutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trio

from omni_actors.config import Pipeline
from omni_actors.errors import ConfigError, Unsupported
from omni_actors.metrics import Metrics
from omni_actors.orchestrator.routes import Node, reachable
from omni_actors.stages import assets
from omni_actors.system.control import Control

TASKS = {
    ("messages", "text"): "generate",
    ("messages", "image"): "images",
    ("messages", "audio"): "speech",
    ("script", "audio"): "speech",
    ("audio", "transcript"): "transcription",
}
"""The name of a task, by the kind of input and the modality of the output."""
log = logging.getLogger("omni_actors.statistics")
log.addHandler(logging.NullHandler())


class Information(Control):
    """The methods of ``OmniSystem`` that describe it."""

    pipeline: Pipeline
    metrics: Metrics
    _models: Mapping[str, Path]
    _nodes: dict[str, Node]

    def __init__(self) -> None:
        super().__init__()
        self._logged_at, self._logged_ended = time.monotonic(), 0.0

    async def get_tokenizer(self, stage: str | None = None) -> Any:
        """Return the tokenizer of a stage, as transformers loads it (``AutoTokenizer``), in a thread.

        Args:
            stage: The stage; by default the first one whose model has a tokenizer.

        Raises InvalidRequest (no such stage), Unsupported (the stage has no tokenizer). It imports transformers into
        this process.
        """
        for name in self._stages(None if stage is None else (stage,)):
            configured = self.pipeline.stages[name].tokenizer
            directory = assets.resolve(configured) if configured is not None else self._models.get(name)
            for place in () if directory is None else (directory, directory / "tokenizer"):  # diffusers has it there
                if (place / "tokenizer_config.json").exists():
                    return await trio.to_thread.run_sync(_load_tokenizer, place)
        raise Unsupported(stage or next(iter(self._nodes)), "get_tokenizer", "its model has no tokenizer")

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Return what the pipeline can do: "generate" (text), "images", "speech", "transcription"."""
        await trio.lowlevel.checkpoint()
        tasks = {task for (kind, modality), task in TASKS.items() if modality in reachable(self._nodes, [kind])}
        return tuple(sorted(tasks))

    @functools.cached_property
    def model_config(self) -> Mapping[str, Mapping[str, Any]]:
        """The contents of ``config.json`` of each stage's model, for the stages whose model has one.

        Raises ConfigError: a file is not JSON.
        """
        files = {stage: directory / "config.json" for stage, directory in self._models.items()}
        return {stage: _config(file) for stage, file in files.items() if file.exists()}

    async def do_log_stats(self) -> None:
        """Log one line of statistics, under the logger ``omni_actors.statistics`` with the level INFO."""
        await trio.lowlevel.checkpoint()
        samples = [sample for metric in self.metrics.requests.collect() for sample in metric.samples]
        ended = sum(sample.value for sample in samples if sample.name.endswith("_total"))
        now, queued = time.monotonic(), self._orchestrator.queued
        rate = (ended - self._logged_ended) / max(1e-9, now - self._logged_at)
        loads = {str(each): self._orchestrator.pools.loads[each] for each in self._supervisor.replicas}
        log.info(
            "requests: %d in flight, %d of them waiting; %d ended, %.2f per second since %.1f s ago; by replica: %s",
            self._orchestrator.in_flight,
            queued,
            ended,
            rate,
            now - self._logged_at,
            ", ".join(f"{address} {load}" for address, load in loads.items()),
        )
        self._logged_at, self._logged_ended = now, ended


def _config(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or nested too deeply
        raise ConfigError(str(file), "(document)", file.name, f"the configuration of a model ({error})") from error


def _load_tokenizer(directory: Path) -> Any:
    return pkgutil.resolve_name("transformers:AutoTokenizer").from_pretrained(directory, local_files_only=True)
