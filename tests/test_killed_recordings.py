"""SIGKILL of the workers that transcribe a long recording: the transcript is the undisturbed one, nothing twice.

No window is decoded again whose outputs the client has.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import trio

from omni_actors import AudioChunk, OmniSystem
from omni_actors.config import Pipeline, Stage
from omni_actors.outputs import Output
from tests.support.echo_systems import OFTEN, pid_of
from tests.support.long_recording import RATE, WINDOWS, long_recording
from tests.support.shared_system import SharedSystem, open_shared_system
from tests.support.worker_environment import noisy_workers

pytestmark = [pytest.mark.voice, pytest.mark.slow, pytest.mark.timeout(600)]

WATCHDOG_S = 200.0
SECOND_WINDOW = len(WINDOWS[0]) + 1
"""The number of its output, from 1."""
OUTPUTS = sum(map(len, WINDOWS)) + 1


class Heard(NamedTuple):
    """What a client has of one request, and what was decoded for it."""

    outputs: dict[str, list[dict[str, Any]]]
    """The data of the outputs of each stage."""
    windows: list[list[int]]
    """The frames at which windows begin, of each incarnation of whisper that has decoded some."""
    replays: int

    @property
    def transcript(self) -> list[str]:
        return [data["text"] for data in self.outputs["whisper"]]


class Recordings:
    """A running pipeline: whisper, and a stage below that repeats its text. folder: of the log and the plan."""

    def __init__(self, folder: Path) -> None:
        self._log, self._plan = folder / "log", folder / "plan"
        self._expected: dict[str | None, Heard] = {}

    def open(self, **more: Any) -> Any:
        """Open the pipeline. more: of whisper's stage."""
        options = {"log": str(self._log), "plan": str(self._plan)}
        each: dict[str, Any] = {"threads": 1, "restart": OFTEN}
        whisper = {"resumable": True, **more, **each, "options": options, "model": "whisper-tiny.en"}
        engine = "tests.support.stopping_whisper:StoppingWhisper"
        stages = {
            "whisper": Stage(engine=engine, accepts=("audio",), emits="transcript", **whisper),
            "below": Stage(engine="echo", inputs=("whisper",), emits="text", **each),
        }
        return OmniSystem.open(Pipeline(name="recordings", stages=stages))

    async def hear(
        self,
        omni: OmniSystem,
        *killed: str,
        at: int = 0,
        audio: Any = None,
        timestamps: str | None = None,
        on_output: Callable[[], object] = lambda: None,
    ) -> Heard:
        """Transcribe the recording. SIGKILL the workers of these stages when whisper has put out ``at`` outputs."""
        self._log.write_text("")
        self._plan.write_text(str(at or ""))
        asked: dict[str, Any] = {} if timestamps is None else {"timestamps": timestamps}
        generation = omni.generate(
            multi_modal_data={"audio": AudioChunk(long_recording(), RATE) if audio is None else audio},
            modalities=("transcript", "text"),
            **asked,
        )
        outputs: list[Output] = []
        with trio.fail_after(WATCHDOG_S):
            async for output in generation:
                outputs.append(output)
                on_output()
                if output.stage == "whisper" and sum(each.stage == "whisper" for each in outputs) == at:
                    for stage in killed:
                        os.kill(pid_of(omni, stage), signal.SIGKILL)
            while not omni.health().ready:
                await omni.wait_changed()
        by_process: dict[str, list[int]] = {}
        for line in self._log.read_text().splitlines():
            pid, seek = line.split()
            by_process.setdefault(pid, []).append(int(seek))
        metrics = outputs[-1].metrics
        assert metrics is not None
        data = {stage: [dict(each.data) for each in outputs if each.stage == stage] for stage in ("whisper", "below")}
        return Heard(data, list(by_process.values()), metrics.replays)

    async def undisturbed(self, omni: OmniSystem, timestamps: str | None = None) -> Heard:
        if timestamps not in self._expected:
            self._expected[timestamps] = heard = await self.hear(omni, timestamps=timestamps)
            assert heard.replays == 0
            assert len(heard.transcript) == OUTPUTS
            assert list(map(len, heard.windows)) == [len(WINDOWS)]
        return self._expected[timestamps]

    def check(self, heard: Heard, expected: Heard, decided: int) -> None:
        """Check an answer after one death of whisper. decided: the windows of which the client had outputs."""
        assert heard.replays == 1
        assert heard.outputs["below"] == heard.outputs["whisper"], "the stage below has nothing twice, and all of it"
        [windows], (before, after) = expected.windows, heard.windows
        assert before == windows[:decided]
        assert (after[0], len(after)) == (windows[decided], len(windows) - decided), "no window is decoded again"


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    return Recordings(tmp_path_factory.mktemp("recordings"))


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int], recordings: Recordings) -> Iterator[SharedSystem]:
    with open_shared_system(recordings.open, fixture_processes) as shared_system:
        yield shared_system


@pytest.mark.parametrize("timestamps", [None, "word"])
@pytest.mark.parametrize(("at", "decided"), [(1, 1), (2, 1), (SECOND_WINDOW, 2)])
def test_whisper_killed_behind_an_output(
    shared_system: SharedSystem, recordings: Recordings, at: int, decided: int, timestamps: str | None
) -> None:
    async def work(omni: OmniSystem) -> None:
        expected = await recordings.undisturbed(omni, timestamps)
        heard = await recordings.hear(omni, "whisper", at=at, timestamps=timestamps)
        recordings.check(heard, expected, decided)
        assert heard.outputs == expected.outputs

    shared_system.run(work)


def test_whisper_killed_behind_its_last_output(shared_system: SharedSystem, recordings: Recordings) -> None:
    async def work(omni: OmniSystem) -> None:
        expected = await recordings.undisturbed(omni)
        heard = await recordings.hear(omni, "whisper", at=OUTPUTS)
        assert heard.outputs == expected.outputs
        assert heard.windows == expected.windows, "nothing is decoded again"

    shared_system.run(work)


def test_whisper_and_the_stage_below_killed_at_once(shared_system: SharedSystem, recordings: Recordings) -> None:
    """The stage below needs all outputs again. None of their windows is decoded again."""

    async def work(omni: OmniSystem) -> None:
        expected = await recordings.undisturbed(omni, "word")
        heard = await recordings.hear(omni, "whisper", "below", at=SECOND_WINDOW, timestamps="word")
        recordings.check(heard, expected, 2)
        assert heard.outputs == expected.outputs

    shared_system.run(work)


def test_whisper_killed_while_the_recording_arrives(shared_system: SharedSystem, recordings: Recordings) -> None:
    pieces = np.array_split(long_recording(), 60)

    async def work(omni: OmniSystem) -> None:
        async def arriving(until: trio.Event) -> AsyncIterator[AudioChunk]:
            for number, piece in enumerate(pieces):
                if number == len(pieces) // 2:
                    await until.wait()
                yield AudioChunk(piece, RATE)

        at_once = trio.Event()
        at_once.set()
        expected = await recordings.hear(omni, audio=arriving(at_once))
        has_output = trio.Event()
        heard = await recordings.hear(omni, "whisper", at=1, audio=arriving(has_output), on_output=has_output.set)
        recordings.check(heard, expected, 1)
        assert heard.outputs == expected.outputs

    shared_system.run(work)


@pytest.mark.skipif("OMNI_ACTORS_TEST_NOISE" in os.environ, reason="this test adds its own, larger noise")
def test_an_incarnation_that_computes_otherwise_goes_on(shared_system: SharedSystem, recordings: Recordings) -> None:
    """Nothing is compared: it measures other log probabilities, and may hear other words or begin windows elsewhere."""

    async def work(omni: OmniSystem) -> None:
        expected = await recordings.undisturbed(omni, "word")
        heard = await recordings.hear(omni, "whisper", at=1, timestamps="word")
        assert heard.replays == 1
        assert heard.outputs["below"] == heard.outputs["whisper"]
        [windows], (before, after) = expected.windows, heard.windows
        assert [*before, after[0]] == windows[:2]
        assert after == sorted(set(after)), "no window is decoded again"
        first = len(WINDOWS[0])
        known, rest = heard.outputs["whisper"][:first], heard.outputs["whisper"][first:-1]
        assert known == expected.outputs["whisper"][:first]
        starts = [data["segment"]["start"] for data in known + rest]
        assert starts == sorted(set(starts)), "nothing comes twice"
        assert rest, "the rest of the recording is missing"
        measured = [data["segment"]["avg_logprob"] for data in expected.outputs["whisper"][first:-1]]
        assert [data["segment"]["avg_logprob"] for data in rest] != measured, "the noise has no effect"

    with noisy_workers(seed=1):
        shared_system.run(work)
