"""Draw a picture, kill a worker at a place of a denoising step, and compare the picture with the undisturbed one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import trio

from omni_actors import OmniSystem, Picture
from tests.support.killing_engines import PLACES, write_plan

STEPS = 4
WATCHDOG_S = 200.0
WORKERS: dict[str, dict[str, int]] = {"cold": {}, "standby": {"standby": 1}, "replicas": {"replicas": 2}}
"""What takes over: the restarted worker, a standby, or another replica. Settings of every stage."""
SUBMITTED = "submitted"
"""A place before the first step: the request was dispatched, and no worker has it yet."""
ASKED: dict[str, Any] = {"steps": STEPS, "previews": 1, "seed": 1, "modalities": ("image",)}
Spot: TypeAlias = tuple[int, str, str]
"""Step, place and stage. Among several of one step and place, the denoiser is killed last."""
IMAGE = np.random.default_rng(0).integers(0, 255, (32, 48, 3), np.uint8)


class Family(NamedTuple):
    """A pipeline that makes pictures.

    stages: all that a request uses. denoiser: the one that denoises, by ``engine``. asked: what a request has, besides
    ``ASKED``. options: of the denoiser's stage. config: the pipeline to open; None opens the checkpoint's directory.
    checkpoints: whether the denoiser goes on from its last step; otherwise it begins again.
    """

    stages: tuple[str, ...]
    denoiser: str
    engine: str
    asked: Mapping[str, Any]
    options: Mapping[str, Any] = {}
    config: str | None = None
    checkpoints: bool = True


GUIDED = {"size": "48x32", "guidance": 3.0}
FAMILIES = {
    "qwen_image": Family(
        stages=("text_encoder", "image_encoder", "denoiser", "vae"),
        denoiser="denoiser",
        engine="qwen_image_denoiser",
        asked={**GUIDED, "prompt": "a red fox", "negative_prompt": "grey", "image": IMAGE, "strength": 1.0},
    ),
    "bagel": Family(
        stages=("context", "denoiser"),
        denoiser="denoiser",
        engine="bagel_denoiser",
        asked={**GUIDED, "prompt": "make it red", "image": IMAGE},
    ),
    "bagel_one_stage": Family(
        stages=("bagel",),
        denoiser="bagel",
        engine="bagel",
        asked={**GUIDED, "prompt": "make it red", "image": IMAGE},
        options={"context": 512},
        config="bagel_one_stage",
    ),
    "diffusers": Family(
        stages=("diffusers",),
        denoiser="diffusers",
        engine="diffusers",
        asked={**GUIDED, "prompt": "a red fox", "negative_prompt": "grey"},
        checkpoints=False,
    ),
}


def save(family: str, directory: Path) -> Path:
    """Write a tiny checkpoint with random weights, and return its directory."""
    from tiny_models import bagel, diffusers_pipelines, qwen_image

    if family == "diffusers":
        return diffusers_pipelines.save(directory / "tiny", "stable_diffusion_3")
    return (qwen_image if family == "qwen_image" else bagel).save(directory)


def spots(family: Family, workers: str) -> list[Spot]:
    """Return where workers are killed. Neighbours in the list are of different stages.

    All places of a step are for restarted workers. What another worker takes over does not depend on them.
    """
    of_step = PLACES if workers == "cold" else ("computed",)
    places = [(0, SUBMITTED), *((step, place) for step in range(1, STEPS + 1) for place in of_step)]
    return [(*place, stage) for place in places for stage in family.stages]


class Drawn(NamedTuple):
    """What a client has of one request. pictures: by step, the previews and the picture. computed: steps, in order."""

    pictures: dict[int, Picture]
    computed: list[int]
    replays: int

    @property
    def repeated(self) -> int:
        """Steps that were done a second time."""
        return len(self.computed) - STEPS


class KilledPictures:
    """A running pipeline whose workers are killed. folder: of its log and its plan. workers: a key of ``WORKERS``."""

    def __init__(self, family: Family, checkpoint: Path, folder: Path, workers: str = "cold") -> None:
        self._family, self._checkpoint, self._workers = family, checkpoint, workers
        self._log, self._plan = folder / "log", folder / "plan"
        self._expected: Drawn | None = None
        self.kills, self.replayed, self.most_repeated = 0, 0, 0

    def open(self) -> Any:
        """Open the pipeline on the checkpoint, with the denoiser that kills."""
        family, restart = self._family, {"intensity": 1000, "backoff_s": 0.01, "backoff_max_s": 0.01}
        each = {"threads": 1, "restart": restart, "device": "cpu", **WORKERS[self._workers]}
        settings: dict[str, Any] = {
            f"stages.{name}.{key}": value for name in family.stages for key, value in each.items()
        }
        of_denoiser = {
            "engine": "tests.support.killing_engines:make",
            "options": {**family.options, "engine": family.engine, "log": str(self._log), "plan": str(self._plan)},
            "resumable": True,
        }
        settings |= {f"stages.{family.denoiser}.{key}": value for key, value in of_denoiser.items()}
        if family.config is not None:
            settings[f"stages.{family.denoiser}.model"] = str(self._checkpoint)
        return OmniSystem.open(family.config or self._checkpoint, overrides={**settings, "limits.replays": 100})

    async def draw(self, omni: OmniSystem, *spots: Spot) -> Drawn:
        """Draw the picture. SIGKILL the workers that have the request at these places."""
        self._log.write_text("")
        generation, plan = omni.generate(**self._family.asked, **ASKED), []
        for step, place, stage in spots:  # the request is placed, and its workers hear of it when this task waits
            address = generation.stream.request.replay_state.placement[stage]
            pid = omni.health().stages[stage][address.replica].pid
            assert pid is not None
            if place == SUBMITTED:
                os.kill(pid, signal.SIGKILL)
            else:
                plan.append([step, place, 0 if stage == self._family.denoiser else pid])
        write_plan(self._plan, plan)
        with trio.fail_after(WATCHDOG_S):
            outputs = [output async for output in generation]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        pictures = [output.delta for output in outputs if output.delta is not None]
        steps = [picture.step for picture in pictures]
        assert steps == sorted(set(steps)), "a preview came twice, or out of order"
        assert pictures[-1].final
        metrics = outputs[-1].metrics
        assert metrics is not None
        computed = [int(line) for line in self._log.read_text().split()]
        return Drawn(dict(zip(steps, pictures, strict=True)), computed, metrics.replays)

    async def kill(self, omni: OmniSystem, *spots: Spot) -> None:
        """Kill workers there, and check the picture. Waits first until all workers of these stages are ready."""
        if self._expected is None:
            self._expected = await self.draw(omni)
            assert self._expected.computed == list(range(1, STEPS + 1))
        for _, _, stage in spots:
            await self._wait_ready(omni, stage)
        drawn = await self.draw(omni, *spots)
        assert json.loads(self._plan.read_text()) == [], "the request did not come to that place"
        assert sorted(set(drawn.computed)) == list(range(1, STEPS + 1))
        for step, picture in drawn.pictures.items():
            np.testing.assert_array_equal(picture.pixels, self._expected.pictures[step].pixels)
        of_denoiser = [step for step, _, stage in spots if stage == self._family.denoiser]
        allowed = len(of_denoiser) if self._family.checkpoints else sum(of_denoiser)
        assert drawn.repeated <= allowed, f"{drawn.computed}: too many steps were done twice"
        self.kills += len(spots)
        self.replayed += drawn.replays > 0
        self.most_repeated = max(self.most_repeated, drawn.repeated)

    async def _wait_ready(self, omni: OmniSystem, stage: str) -> None:
        with trio.fail_after(WATCHDOG_S):
            while not omni.health().ready or any(each.state != "ready" for each in omni.health().stages[stage]):
                await omni.wait_changed()
