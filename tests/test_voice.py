"""The main job, end to end, with the real models: answers in text and speech, through the death of any worker."""

from __future__ import annotations

import functools
import os
import re
import runpy
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
import trio

from omni_actors import AudioChunk, OmniSystem
from omni_actors.errors import InvalidRequest, StageCrashed
from omni_actors.generation import Generation
from omni_actors.outputs import Output
from omni_actors.stages import assets
from tests.support.closeness import assert_same_sound
from tests.support.echo_systems import generation_of, pid_of, wait_restarted
from tests.support.readme import PROGRAM, ROOT
from tests.support.shared_system import SharedSystem, open_shared_system, use_shared_system, with_shared_system
from tests.support.spoken_answers import sound_of, text_of

pytestmark = [pytest.mark.voice, pytest.mark.slow, pytest.mark.timeout(300)]
"""A part of it stays in make test: serve/test_with_models.py."""

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Name a famous painter.",
    "Who wrote Hamlet?",
)


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int]) -> Iterator[SharedSystem]:
    for model in assets.NAMES:
        assets.prepare(model, print)
    more = {f"stages.{stage}.restart.intensity": 1000 for stage in ("llm", "vocoder")}  # some kills are repeated
    more["stages.llm.threads"] = 1  # other tests run at the same time
    opening = lambda: OmniSystem.open("voice", **more)  # noqa: E731
    with open_shared_system(opening, fixture_processes, clear_choices=True) as shared_system:
        yield shared_system


async def answer(omni: OmniSystem, *args: object, **kwargs: object) -> tuple[str, AudioChunk]:
    outputs = [out async for out in omni.generate(*args, **kwargs)]  # type: ignore[arg-type]
    rates = {out.delta.sample_rate for out in outputs if isinstance(out.delta, AudioChunk)}
    return text_of(outputs), AudioChunk(sound_of(outputs), rates.pop() if rates else 24_000)


async def transcribe(omni: OmniSystem, clip: AudioChunk) -> str:
    return (await answer(omni, multi_modal_data={"audio": clip}, modalities=("transcript",)))[0]


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


@with_shared_system
async def test_a_question_is_answered_in_text_and_speech_written_and_spoken_alike(omni: OmniSystem) -> None:
    text, speech = await answer(omni, QUESTIONS[0], modalities=("text", "audio"))
    assert "Paris" in text
    assert np.abs(speech.samples).max() <= 1.0
    assert words(await transcribe(omni, speech)) == words(text)

    # The spoken question, in our own voice, is transcribed and gets the answer to the written question.
    _, question = await answer(omni, script=QUESTIONS[0], modalities=("audio",))
    spoken, _ = await answer(omni, multi_modal_data={"audio": question}, modalities=("text",))
    assert "Paris" in spoken

    # The metrics are consistent: text before sound, and bytes on every ring of the route.
    answers = omni.generate(QUESTIONS[0], modalities=("text", "audio"))
    final = [out async for out in answers][-1].metrics
    assert final is not None
    assert final.ttft_s < final.ttfa_s < final.total_s  # type: ignore[operator]
    assert final.audio_s == pytest.approx(speech.duration_s)
    assert {name: set(stage.sent_bytes) for name, stage in final.stages.items()} == {
        "llm": {"client.0", "acoustic.0"},
        "acoustic": {"vocoder.0"},
        "vocoder": {"client.0"},
    }
    assert all(size > 0 for stage in final.stages.values() for size in stage.sent_bytes.values())


@with_shared_system
async def test_concurrent_requests_get_their_own_text_and_speech_starts_early(omni: OmniSystem) -> None:
    alone = [(await answer(omni, question, max_tokens=6))[0] for question in QUESTIONS]
    together: dict[str, str] = {}

    async def ask(question: str) -> None:
        together[question] = (await answer(omni, question, max_tokens=6))[0]

    async with trio.open_nursery() as nursery:
        for question in QUESTIONS:
            nursery.start_soon(ask, question)
    assert [together[question] for question in QUESTIONS] == alone

    # Speech starts before the text is complete, in the order of the outputs.
    order = [
        type(out.delta).__name__
        async for out in omni.generate(
            "Write three sentences about the sea.", modalities=("text", "audio"), max_tokens=40
        )
        if out.delta is not None
    ]
    assert order.index("AudioChunk") < len(order) - 1 - order[::-1].index("str")


@with_shared_system
async def test_deaths_of_workers_fail_requests_that_are_not_replayed_and_change_no_other(omni: OmniSystem) -> None:
    """The llm dies in the middle of the text, the vocoder in the middle of the sound, of a request that is replayed."""
    ask = functools.partial(omni.generate, QUESTIONS[1], modalities=("text", "audio"), seed=3)
    undisturbed = [out async for out in ask(max_tokens=24)]
    fail = functools.partial(omni.generate, on_failure="fail")
    replays = 0
    while replays < 2:  # a stage may have finished before its death, or both may have died before the first replay
        outputs: list[Output] = []
        targets = {
            "text": ("llm", functools.partial(fail, QUESTIONS[0])),
            "audio": ("vocoder", functools.partial(fail, script=QUESTIONS[0], modalities=("audio",))),
        }
        before = {stage: generation_of(omni, stage) for stage, _ in targets.values()}
        crashed = []
        async for out in ask(max_tokens=24):
            outputs.append(out)
            if out.modality in targets:
                stage, request = targets.pop(out.modality)
                crashed.append((request(), stage, kill(omni, stage)))
        assert not targets
        assert text_of(outputs) == text_of(undisturbed)
        assert_same_sound(sound_of(outputs), sound_of(undisturbed))
        assert outputs[-1].metrics is not None
        replays = outputs[-1].metrics.replays
        for crash in crashed:
            await expect_crash(*crash)
        for stage, generation in before.items():
            await wait_restarted(omni, stage, generation + 1)
    assert replays == 2


@with_shared_system
async def test_the_next_request_is_answered_after_deaths_of_the_other_stages(omni: OmniSystem) -> None:
    spoken = {"audio": (await answer(omni, script=QUESTIONS[0], modalities=("audio",)))[1]}
    ask = functools.partial(omni.generate, multi_modal_data=spoken, modalities=("text", "audio"), on_failure="fail")
    for stage in ("whisper", "acoustic"):
        await expect_crash(ask(), stage, kill(omni, stage))
        while not omni.health().ready:
            await omni.wait_changed()
    text, speech = await answer(omni, multi_modal_data=spoken, modalities=("text", "audio"))
    assert "Paris" in text
    assert "paris" in words(await transcribe(omni, speech))


async def expect_crash(request: Generation, stage: str, pid: int) -> None:
    """Assert that a request ends because its worker ``pid`` of ``stage`` was killed."""
    with pytest.raises(StageCrashed) as caught:
        async for _ in request:
            pass
    assert (caught.value.stage, caught.value.signal, caught.value.pid) == (stage, "SIGKILL", pid)


def kill(omni: OmniSystem, stage: str) -> int:
    pid = pid_of(omni, stage)
    os.kill(pid, signal.SIGKILL)
    return pid


BAD_INPUT: tuple[tuple[dict[str, object], str], ...] = (
    ({"prompt": ""}, "messages"),
    ({"prompt": "word " * 4000}, "messages"),
    ({"prompt": "hello", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "hello", "no_such_parameter": 1}, "no_such_parameter"),
    ({"prompt": "hello", "modalities": ("smell",)}, "modalities"),
    ({"script": "", "modalities": ("audio",)}, "input"),
    ({"prompt": "what is it?", "multi_modal_data": {"image": b""}}, "multi_modal_data"),
    ({"multi_modal_data": {"audio": AudioChunk(np.zeros(0, np.float32), 16_000)}}, "audio"),
)


@with_shared_system
async def test_invalid_input_is_refused_with_its_parameter_and_the_system_stays_in_service(omni: OmniSystem) -> None:
    for arguments, param in BAD_INPUT:
        with pytest.raises(InvalidRequest) as caught:
            await answer(omni, **arguments)
        assert (arguments, caught.value.param) == (arguments, param)
    assert "Paris" in (await answer(omni, QUESTIONS[0]))[0]


def run_here(file: Path, shared_system: SharedSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a program with the open system in place of its own, as in test_examples.py."""
    with monkeypatch.context() as patch:
        asked = use_shared_system(shared_system, patch)
        runpy.run_path(str(file), run_name="__main__")
    assert [pipeline.name for pipeline in asked] == ["voice"]


def test_the_program_of_the_readme_runs(
    shared_system: SharedSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    run_here(tmp_path / "program.py", shared_system, monkeypatch)
    assert "Paris" in "".join(re.findall(r"text (.*)", capsys.readouterr().out))


def test_the_example_of_the_readme_runs(
    shared_system: SharedSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_here(ROOT / "examples" / "ask.py", shared_system, monkeypatch)
    assert re.search(r"\w\nfirst text [\d.]+ s, first sound [\d.]+ s\n$", capsys.readouterr().out)
    assert soundfile.info("answer.wav").duration > 1
