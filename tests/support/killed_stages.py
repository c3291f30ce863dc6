"""Ask a system, kill a worker in the middle of the answer, and judge the answer.

Each pipeline runs in three configurations:

exact     float32, no noise: the answer is equal to the undisturbed one.
noisy     float32; every incarnation after the first has the noise of ``decision_noise``.
bfloat16  the same, with language models in bfloat16. Its rounding takes the place of the noise of rows, which is less
          than half a unit in their last place.

With noise, what follows a death may differ from the undisturbed answer. So a reference follows the answer's decisions
(``forced_decoding``): each must be what the reference would decide, up to a margin. The text must be that of the
decided tokens, and the samples must follow from what was decided: nothing is missing and nothing is there twice.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple

import numpy as np
import trio

from omni_actors import OmniSystem
from omni_actors.outputs import Output
from omni_actors.protocol.messages import Decisions
from omni_actors.stages.omni.talker import END
from tests.support.closeness import assert_same_sound
from tests.support.shared_system import SharedSystem, open_shared_system
from tests.support.spoken_answers import sound_of, text_of
from tests.support.worker_environment import noisy_workers

DTYPES = {"exact": "float32", "noisy": "float32", "bfloat16": "bfloat16"}
"""Of the language models, by configuration."""
EVERY = 10
"""Outputs between two places where a worker is killed."""
IN_TURN = "in turn"
"""In the place of a stage's name: the stages are killed in turn, of sampled answers."""
WATCHDOG_S = 200.0


class Heard(NamedTuple):
    """What a client has of one request, and what the stages decided for it."""

    texts: dict[str, str]
    """Of each modality."""
    sound: np.ndarray[Any, np.dtype[np.float32]]
    journals: dict[str, tuple[Decisions, ...]]
    """Of each stage, one entry per chunk."""
    finish_reason: str | None
    """Why the text ended ("stop" or "length"); None if the answer has no text."""
    outputs: int
    replays: int
    killed: bool
    """Whether the answer was long enough for the kill."""

    @property
    def text(self) -> str:
        return self.texts["text"]

    def decided(self, stage: str) -> list[int]:
        """Return a stage's decisions, joined."""
        return list(itertools.chain.from_iterable(self.journals[stage]))

    @property
    def codes(self) -> list[tuple[int, ...]]:
        """The codes of each frame that the talker has made."""
        frames = [entry[:-1] if entry[-1] == END else entry for entry in self.journals["talker"]]
        return [frame for frame in frames if frame]


async def hear(omni: OmniSystem, *stages: str, at: int = 0, **asked: Any) -> Heard:
    """Ask, and read the answer. SIGKILL the workers of ``stages`` when output number ``at`` has arrived.

    Returns when all stages are ready again. asked: the arguments of ``OmniSystem.generate``.
    """
    generation = omni.generate(**asked)
    outputs: list[Output] = []
    killed: dict[str, int] = {}
    with trio.fail_after(WATCHDOG_S):
        async for output in generation:
            outputs.append(output)
            if len(outputs) == at:
                for stage in stages:
                    killed[stage] = pid = _pid(omni, stage)
                    os.kill(pid, signal.SIGKILL)
        while any(_pid_of_ready(omni, stage) in (None, pid) for stage, pid in killed.items()):
            await omni.wait_changed()
    _check_ends(outputs)
    request = generation.stream.request
    entries = {stage: [*request.resumption.entries(stage)] for stage in request.route.stages}
    journals = {stage: tuple(itertools.chain(*(part.entries for part in parts))) for stage, parts in entries.items()}
    for stage, sequence in request.chunk_sequences.items():
        assert not journals[stage] or len(journals[stage]) == sequence.received, "one entry per chunk"
    metrics = outputs[-1].metrics
    assert metrics is not None
    modalities = {output.modality for output in outputs}
    texts = {each: text_of([output for output in outputs if output.modality == each]) for each in modalities}
    reasons = [output.data["finish_reason"] for output in outputs if "finish_reason" in output.data]
    return Heard(
        texts=texts,
        finish_reason=reasons[-1] if reasons else None,
        sound=sound_of(outputs),
        journals=journals,
        outputs=len(outputs),
        replays=metrics.replays,
        killed=bool(killed),
    )


class Killed:
    """A pipeline in one configuration, whose workers are killed.

    ``stages``, and the parameters of a ``greedy`` and of a ``sampled`` request, are the subclass's.
    """

    stages: tuple[str, ...]
    done_early: ClassVar[frozenset[str]] = frozenset()
    """The stages that have finished a request before its first output, so that their death costs it nothing."""
    greedy: ClassVar[Mapping[str, Any]]
    sampled: ClassVar[Mapping[str, Any]]

    def __init__(self, configuration: str) -> None:
        self.configuration = configuration
        self.largest: dict[str, float] = {}
        """The largest of each kind of difference that the checks have found."""
        self._expected: dict[frozenset[tuple[str, Any]], Heard] = {}

    def note(self, kind: str, differences: Any) -> float:
        """Add differences of one kind to ``largest``; return the largest of them."""
        found = float(np.max(differences))
        self.largest[kind] = max(found, self.largest.get(kind, 0.0))
        return found

    def open(self) -> AbstractAsyncContextManager[OmniSystem]:
        """Open the pipeline."""
        raise NotImplementedError

    async def hear(self, omni: OmniSystem, params: Mapping[str, Any], *stages: str, at: int = 0) -> Heard:
        """Ask the question, and kill the workers of ``stages`` at output number ``at``. params: of the request."""
        raise NotImplementedError

    def check(self, heard: Heard, params: Mapping[str, Any]) -> None:
        """Raise AssertionError unless a reference follows the answer."""
        raise NotImplementedError

    @contextmanager
    def running(self, fixture_processes: set[int]) -> Iterator[SharedSystem]:
        """Run the system until the block ends."""
        exact = self.configuration == "exact"
        with (
            open_shared_system(self.open, fixture_processes, clear_choices=exact) as shared_system,
            nullcontext() if exact else noisy_workers(seed=1),
        ):
            yield shared_system

    async def undisturbed(self, omni: OmniSystem, params: Mapping[str, Any]) -> Heard:
        """Return the answer without a death. Computed once, by the first incarnations unless a test has killed them."""
        key = frozenset(params.items())
        if key not in self._expected:
            self._expected[key] = await self.hear(omni, params)
        return self._expected[key]

    async def kill_at_every_tenth_output(self, omni: OmniSystem, stage: str) -> dict[str, float]:
        """Kill a stage, or all ``IN_TURN``, at the first and at every tenth output. Return counts, and ``largest``."""
        params, stages = (self.sampled, self.stages) if stage == IN_TURN else (self.greedy, (stage,))
        expected = await self.undisturbed(omni, params)
        places = (1, *range(EVERY, expected.outputs, EVERY))
        counts = await self.kill(omni, zip(places, itertools.cycle(stages), strict=False), params)
        assert counts["kills"] == len(places) or self.configuration != "exact"
        assert counts["resumed"] > 0 or stage in self.done_early
        return {**counts, **self.largest}

    async def kill(
        self, omni: OmniSystem, kills: Iterable[tuple[int, str]], params: Mapping[str, Any]
    ) -> dict[str, int]:
        """For each (output, stage) ask once, kill that stage there, and check the answer. Returns counts."""
        counts = {"kills": 0, "resumed": 0, "equal": 0}
        expected = await self.undisturbed(omni, params)
        for at, stage in kills:
            heard = await self.hear(omni, params, stage, at=at)
            counts["kills"] += heard.killed
            counts["resumed"] += heard.replays
            counts["equal"] += heard.journals == expected.journals
            if self.configuration == "exact":
                assert (heard.texts, heard.journals) == (expected.texts, expected.journals)
                assert_same_sound(heard.sound, expected.sound)
            else:
                self.check(heard, params)
        return counts


def kill_at_every_tenth_output(
    killed: Killed, shared_system: SharedSystem, stage: str, record_property: Callable[[str, object], None]
) -> None:
    """Run one case, and record its figures in the report of the test."""

    async def work(omni: OmniSystem) -> None:
        for name, figure in (await killed.kill_at_every_tenth_output(omni, stage)).items():
            record_property(name, figure)

    shared_system.run(work)


def _check_ends(outputs: list[Output]) -> None:
    """Each stage's last output is marked so, and no other is."""
    for stage in {output.stage for output in outputs}:
        marks = [output.finished for output in outputs if output.stage == stage]
        assert marks == [False] * (len(marks) - 1) + [True]


def _pid(omni: OmniSystem, stage: str) -> int:
    [replica] = omni.health().stages[stage]
    assert replica.pid is not None
    return replica.pid


def _pid_of_ready(omni: OmniSystem, stage: str) -> int | None:
    [replica] = omni.health().stages[stage]
    return replica.pid if replica.state == "ready" else None
