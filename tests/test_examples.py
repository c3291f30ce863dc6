"""The examples of the omni models, run with a tiny Qwen2.5-Omni with random weights in real processes.

Rules
1. An example runs as a user runs it: the whole file, with arguments, in its own directory.
2. Opening a pipeline takes seconds, so all examples use one system; the pipeline that an example would have opened is
   loaded and checked.
3. The result of an example equals the library's answer to the same question.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
import soundfile
from PIL import Image

from omni_actors import AudioChunk, OmniSystem
from omni_actors.config import Pipeline
from tests.support.media_inputs import RATE, image_file, noise, video_file
from tests.support.shared_system import SharedSystem, open_shared_system, use_shared_system
from tiny_models import qwen2_5 as tiny

EXAMPLES = Path(__file__).parent.parent / "examples"
EVERYTHING = ("--audio", "a.wav", "--audio", "b.wav", "--image", "seen.png", "--video", "clip.mkv")
TOKENS, CODES = 12, 21
"""Tokens of text and codes of speech in every answer."""
SPEECH = CODES * tiny.SAMPLES
"""In samples."""
Samples: TypeAlias = np.ndarray[Any, Any]


class Ran(NamedTuple):
    code: int
    stdout: str
    stderr: str
    pipeline: Pipeline | None
    """Which it asked for, as it would have run."""


Example: TypeAlias = Callable[..., Ran]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model, saved without ends: there is none among the four likeliest codes."""
    return str(tiny.save(tmp_path_factory.mktemp("omni"), text_eos=0.0, codec_eos=0.0))


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int], model: str) -> Iterator[SharedSystem]:
    """The pipeline of the tiny model. The defaults set the length of the answers."""
    small: dict[str, Any] = {
        "stages.thinker.defaults": {"max_tokens": TOKENS},
        "stages.talker.defaults": {"talker_max_tokens": CODES, "talker_top_k": 4},
    }
    for stage in ("thinker", "talker", "token2wav"):
        small |= {f"stages.{stage}.device": "cpu", f"stages.{stage}.threads": 1}
    for stage in ("thinker", "talker"):
        small |= {f"stages.{stage}.options.dtype": "float32", f"stages.{stage}.options.context": 2048}
    with open_shared_system(lambda: OmniSystem.open(model, **small), fixture_processes) as shared_system:
        yield shared_system


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory to run in, with something to be heard and seen."""
    loud = np.random.default_rng(0).normal(0, 0.1, (2 * RATE, 2)).astype(np.float32)
    soundfile.write(tmp_path / "a.wav", loud[: RATE // 2], 22_050)
    soundfile.write(tmp_path / "b.wav", loud[RATE:, 0], RATE)
    (tmp_path / "clip.mkv").write_bytes(video_file(audio=loud[:, :1].T))
    (tmp_path / "seen.png").write_bytes(image_file(Image.fromarray(noise(96, 64, 3))))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Example:
    """(name of an example, *arguments, shared_system=None) -> how it ran.

    shared_system: instead of the pipeline that it would open.
    """

    def run(name: str, *arguments: str, shared_system: SharedSystem | None = None) -> Ran:
        asked: list[Pipeline] = []
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [name, *arguments])
            if shared_system is not None:
                asked = use_shared_system(shared_system, patch)
            with pytest.raises(SystemExit) as left:
                runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        stdout, stderr = capsys.readouterr()
        return Ran(int(left.value.code or 0), stdout, stderr, asked[0] if asked else None)

    return run


def ask(shared_system: SharedSystem, *prompt: str, **more: Any) -> tuple[str, Samples]:
    """Return the text and the samples of the library's answer."""
    text, sound = [], []

    async def work(omni: OmniSystem) -> None:
        async for out in omni.generate(*prompt, modalities=("text", "audio"), **more):
            if isinstance(out.delta, AudioChunk):
                sound.append(out.delta.samples)
            elif out.delta is not None:
                text.append(out.delta)

    shared_system.run(work)
    return "".join(text), np.concatenate(sound)


def wav(file: Path) -> Samples:
    samples, rate = soundfile.read(file, dtype="float32")
    assert rate == 24_000
    return samples  # type: ignore[no-any-return]


def assert_same_sound(file: Path, samples: Samples) -> None:
    assert len(samples) == SPEECH
    np.testing.assert_allclose(wav(file), samples, atol=1e-4)  # 16 bits


@pytest.mark.slow
def test_mixed_modalities_takes_all_kinds_of_files(run: Example, here: Path, shared_system: SharedSystem) -> None:
    asked = ("--use-audio-in-video", "--prompt", "what is it ?", "--seed", "3")
    ran = run("mixed_modalities.py", *EVERYTHING, *asked, shared_system=shared_system)
    assert not ran.stderr
    assert ran.code == 0
    assert ran.pipeline is not None
    assert ran.pipeline.name == "qwen2_5_omni"
    stereo, rate = soundfile.read(here / "a.wav", dtype="float32")
    mono, _ = soundfile.read(here / "b.wav", dtype="float32")
    recordings = [AudioChunk(stereo.mean(axis=1), rate), AudioChunk(mono, RATE)]
    media = {"audio": recordings, "image": here / "seen.png", "video": here / "clip.mkv"}
    text, sound = ask(shared_system, "what is it ?", multi_modal_data=media, use_audio_in_video=True, seed=3)
    assert ran.stdout == text + "\n"
    assert_same_sound(here / "answer.wav", sound)
    assert text not in (
        ask(shared_system, "what is it ?", multi_modal_data=media)[0],
        ask(shared_system, "what is it ?")[0],
    )


@pytest.mark.slow
def test_text_to_speech_writes_speech_and_times(run: Example, here: Path, shared_system: SharedSystem) -> None:
    ran = run(
        "text_to_speech.py",
        "the sea",
        "--speaker",
        "chelsie",
        "--seed",
        "7",
        "--max-tokens",
        "8",
        shared_system=shared_system,
    )
    assert not ran.stderr
    assert ran.code == 0
    assert ran.pipeline is not None
    assert ran.pipeline.name == "qwen3_omni"
    text, sound = ask(shared_system, "the sea", speaker="chelsie", seed=7, max_tokens=8)
    assert ran.stdout.startswith(text + "\n")
    assert_same_sound(here / "answer.wav", sound)
    for other in ({"speaker": "ethan", "seed": 7}, {"speaker": "chelsie", "seed": 8}):
        assert not np.array_equal(ask(shared_system, "the sea", max_tokens=8, **other)[1], sound)
    tables = ran.stdout.removeprefix(text)
    ttft, ttfa, total, speech = map(float, re.findall(r"([\d.]+) s", tables)[:4])
    assert 0 < ttft < ttfa <= total
    assert speech == pytest.approx(len(sound) / 24_000, abs=1e-3)
    time = r"│ [\d.]+ s +"
    rows = re.findall(rf"│ (\w+) +{time * 3}│ (\d+) +│ ([\d.]+) kB → \S+\.0", tables)
    assert [stage for stage, _, _ in rows] == ["thinker", "talker", "token2wav"]
    assert float(rows[2][2]) > 4 * SPEECH / 1000, "bytes of float32, and what goes with them"


@pytest.mark.slow
def test_offline_batch_answers_a_file_of_prompts(
    run: Example, here: Path, shared_system: SharedSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {1: "hello", 3: "what is the sea ?", 4: "too long " * 1000, 5: "a story", 6: "hear the sea", 7: "you"}
    (here / "prompts.txt").write_text("\n".join(prompts.get(line, " ") for line in range(1, 8)))
    in_flight = []
    generate = OmniSystem.generate

    def counted(omni: OmniSystem, *args: Any, **params: Any) -> Any:
        generation = generate(omni, *args, **params)
        in_flight.append(omni.in_flight)
        return generation

    monkeypatch.setattr(OmniSystem, "generate", counted)
    ran = run("offline_batch.py", "prompts.txt", "answers", "--at-once", "3", shared_system=shared_system)
    monkeypatch.undo()

    assert ran.code == 1, "one prompt failed"
    assert ran.stderr.startswith("line 4: ")
    assert ran.stderr.count("\n") == 1
    assert ran.pipeline is not None
    assert (ran.pipeline.name, ran.pipeline.limits.max_requests) == ("qwen3_omni", 3)
    assert max(in_flight) == 3
    del prompts[4]
    assert {file.name for file in (here / "answers").iterdir()} == {
        f"{line:04}{suffix}" for line in prompts for suffix in (".txt", ".wav")
    }
    for line, prompt in prompts.items():
        text = ask(shared_system, prompt)[0]
        assert (here / "answers" / f"{line:04}.txt").read_bytes().decode() == text
        assert len(wav(here / "answers" / f"{line:04}.wav")) == SPEECH
    figures = re.findall(r"\d+\.?\d*", ran.stdout.splitlines()[-2])
    answered, failed, took_s, requests, tokens, audio = map(float, figures)
    assert (answered, failed) == (5, 1)
    # The rates are rounded to 0.01 and the time to 0.1 s; the true values have these relations exactly.
    assert (requests - 0.005) * (took_s - 0.05) <= 5 <= (requests + 0.005) * (took_s + 0.05)
    for rate, per_request in ((tokens, TOKENS), (audio, SPEECH / 24_000)):
        assert (requests - 0.005) * per_request - 0.005 <= rate <= (requests + 0.005) * per_request + 0.005


QUERIES: dict[str, dict[str, Any]] = {
    "text": {},
    "use_audio": {"audio": ["capital.ogg"]},
    "use_image": {"image": "landscape.png"},
    "use_video": {"video": "sunrise.mp4"},
    "use_multi_audios": {"audio": ["capital.ogg", "weather.ogg"]},
    "use_mixed_modalities": {"audio": ["capital.ogg"], "image": "landscape.png", "video": "sunrise.mp4"},
    "use_audio_in_video": {"video": "sunrise.mp4", "use_audio_in_video": True},
}


def arguments_of(query: str) -> dict[str, Any]:
    """The arguments of ``generate`` for a query of qwen_omni.py."""
    media, folder = dict(QUERIES[query]), EXAMPLES / "media"
    more = {"use_audio_in_video": True} if media.pop("use_audio_in_video", False) else {}
    recordings = [AudioChunk(*soundfile.read(folder / name, dtype="float32")) for name in media.pop("audio", [])]
    files = {kind: folder / name for kind, name in media.items()}
    return {"multi_modal_data": {"audio": recordings, **files}, **more}


@pytest.mark.slow
def test_qwen_omni_answers_each_type_of_query(
    run: Example, here: Path, shared_system: SharedSystem, model: str
) -> None:
    texts = set()
    for query in QUERIES:
        asked = ("--model", model, "--query-type", query, "--output-dir", f"out/{query}", "--prompt", "what is it ?")
        ran = run("qwen_omni.py", *asked, "--seed", "3", shared_system=shared_system)
        assert (ran.code, ran.stderr) == (0, ""), query
        text, sound = ask(shared_system, "what is it ?", seed=3, **arguments_of(query))
        assert ran.stdout == text + "\n"
        assert (here / "out" / query / "00000.txt").read_bytes().decode() == text + "\n"
        assert_same_sound(here / "out" / query / "00000.wav", sound)
        texts.add(text)
    assert len(texts) == len(QUERIES), "each medium is heard or seen"


@pytest.mark.slow
def test_qwen_omni_asks_often_without_streaming_and_prints_times(
    run: Example, here: Path, shared_system: SharedSystem, model: str
) -> None:
    asked = ("--model", model, "--query-type", "text", "--num-prompts", "3", "--no-async-chunk", "--enable-stats")
    ran = run("qwen_omni.py", *asked, "--modalities", "text", shared_system=shared_system)
    assert (ran.code, ran.stderr) == (0, "")
    assert ran.pipeline is not None
    assert not ran.pipeline.async_chunk
    assert {file.name for file in (here / "output").iterdir()} == {f"0000{number}.txt" for number in range(3)}
    assert [f"Request {number}, in seconds" in ran.stdout for number in range(3)] == [True] * 3
    assert len(re.findall(r"│ thinker +│ [\d.]+ ", ran.stdout)) == 3


def test_the_media_of_the_examples_are_small_and_readable() -> None:
    files = [file for file in (EXAMPLES / "media").iterdir() if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 200_000
    assert soundfile.info(EXAMPLES / "media" / "capital.ogg").duration > 1
    with Image.open(EXAMPLES / "media" / "landscape.png") as image:
        assert image.size == (160, 120)


def test_qwen_omni_without_its_model_tells_how_to_get_it(run: Example, here: Path) -> None:
    ran = run("qwen_omni.py", "--model", "nobody/nothing", "--query-type", "text")
    assert (ran.code, ran.stdout) == (1, "")
    assert "run: hf download nobody/nothing" in ran.stderr


@pytest.mark.parametrize(
    "arguments",
    [("mixed_modalities.py",), ("text_to_speech.py", "hello"), ("offline_batch.py", "a.txt", "answers")],
    ids=lambda arguments: arguments[0],
)
def test_an_unknown_pipeline_is_one_sentence(run: Example, here: Path, arguments: tuple[str, ...]) -> None:
    (here / "a.txt").write_text("hello\n")
    ran = run(*arguments, "--config", "nothing")
    assert (ran.code, ran.stdout) == (1, "")
    assert re.fullmatch(r"Error: nothing: .*\n", ran.stderr)


def test_mixed_modalities_runs_on_a_pipeline_without_video(run: Example, here: Path) -> None:
    (here / "plain.yaml").write_text("""\
name: plain
stages:
  ear: {engine: "tests.support.served_engines:Ear", accepts: [audio], emits: transcript}
  mind: {engine: echo, accepts: [messages], inputs: [ear], emits: text}
  mouth: {engine: "tests.support.served_engines:Speaker", inputs: [mind], emits: audio}
""")
    ran = run("mixed_modalities.py", "--config", "plain.yaml", "--audio", "b.wav", "--prompt", "hello")
    assert (ran.code, ran.stderr) == (0, "")
    assert soundfile.info("answer.wav").samplerate == 16_000, "the pipeline's own rate"
