"""The vocoder: the waveform of features, and of both stages together."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.hibari.synthesis import SentenceSynthesis
from tests.stages.hibari.features import NAMES, SEA, features_of

pytestmark = pytest.mark.voice


def vocode(vocoder: Any, sentences: list[list[Any]], step: int, **params: Any) -> list[Any]:
    """Return the audio of each sentence. Features are fed in chunks of ``step`` frames, with a step after each."""
    outputs = put_out(vocoder, sentences, step, **params)
    return [
        np.concatenate([o.tensors["audio"] for o in outputs if o.data.get("sentence") == sentence])
        for sentence in range(len(sentences))
    ]


def put_out(vocoder: Any, sentences: list[list[Any]], step: int, **start: Any) -> list[Any]:
    vocoder.start(1, ("talker",), **start)
    outputs = []
    for sentence, (*spectral, f0) in enumerate(sentences):
        for start in range(0, len(f0), step):
            tensors = {n: s[:, start : start + step] for n, s in zip(NAMES, spectral, strict=True)}
            last = sentence == len(sentences) - 1 and start + step >= len(f0)
            data = {"sentence": sentence, "start": start, "frames": len(f0)}
            vocoder.feed(1, data, tensors | ({} if start else {"f0": f0}), last=last, source="talker")
            outputs += vocoder.run().get(1, [])
    assert [output.last for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.data["sample_rate"] for output in outputs} == {24000}
    return outputs


@pytest.mark.parametrize("step", [1, 7, 40, 10**6])
def test_the_waveform_equals_hibaris_at_any_chunk_size(vocoder: Any, voice: Any, step: int) -> None:
    from hibari import dsp

    sentences = [features_of(voice, SEA), features_of(voice, "Who is there?")]
    for number, audio in enumerate(vocode(vocoder, sentences, step)):
        whole = dsp.synth(*sentences[number], np.random.default_rng([0, number]))
        assert audio.dtype == np.float32
        assert audio.shape == whole.shape
        np.testing.assert_allclose(audio, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 5, 6])
def test_the_shortest_sentences_equal_hibaris(vocoder: Any, frames: int) -> None:
    from hibari import dsp

    rng = np.random.default_rng(frames)
    spectral = [rng.normal(-3, 1, (601, frames)).astype(np.float32) for _ in NAMES]
    features = [*spectral, rng.uniform(0, 300, frames).astype(np.float32)]
    whole = dsp.synth(*features, np.random.default_rng([5, 0]))
    for step in (1, 2, 3, frames):
        [audio] = vocode(vocoder, [features], step, seed=5)
        assert audio.shape == whole.shape == (frames * 300,)
        np.testing.assert_allclose(audio, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("step", [1, 2, 5, 7])
def test_a_resumed_request_computes_three_frames_of_context(
    vocoder: Any, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    rng = np.random.default_rng(step)
    sentences = [
        [*rng.normal(-3, 1, (5, 601, frames)).astype(np.float32), rng.uniform(0, 300, frames).astype(np.float32)]
        for frames in (20, 1, 14)
    ]
    expected = put_out(vocoder, sentences, step)
    computed: list[int] = []
    source = SentenceSynthesis._source
    monkeypatch.setattr(SentenceSynthesis, "_source", lambda *of: computed.append(of[2] - of[1]) or source(*of))
    for needed_from in range(len(expected) + 1):
        computed.clear()
        outputs = put_out(vocoder, sentences, step, journal=((),) * needed_from, needed_from=needed_from)
        assert [(output.data, output.last) for output in outputs] == [(o.data, o.last) for o in expected]
        assert not any(output.tensors for output in outputs[:needed_from])
        for output, before in zip(outputs[needed_from:], expected[needed_from:], strict=True):
            np.testing.assert_allclose(output.tensors["audio"], before.tensors["audio"], rtol=0, atol=1e-6)
        # Two more frames at most, behind a chunk that is too short for a sample.
        needed = sum(len(output.tensors["audio"]) for output in outputs if output.tensors) // 300
        assert sum(computed) <= needed + 3 + 2


def test_the_noise_depends_on_the_seed_and_the_sentence(vocoder: Any, voice: Any) -> None:
    sentence = features_of(voice, "Hush.")
    first, second = vocode(vocoder, [sentence, sentence], 40)
    assert not np.array_equal(first, second), "two sentences have the same noise"
    np.testing.assert_equal(vocode(vocoder, [sentence], 40), [first])
    np.testing.assert_equal(vocode(vocoder, [sentence], 40, seed=0), [first])
    audio = {seed: vocode(vocoder, [sentence], 40, seed=seed)[0].tobytes() for seed in (0, 1, -1, 2**63 - 1)}
    assert audio[1] != audio[0] != audio[-1]


def test_audio_comes_before_the_sentence_is_complete(vocoder: Any, voice: Any) -> None:
    *spectral, f0 = features_of(voice, SEA)
    vocoder.start(1, ("talker",))
    tensors = {name: whole[:, :40] for name, whole in zip(NAMES, spectral, strict=True)}
    vocoder.feed(1, {"sentence": 0, "start": 0}, tensors | {"f0": f0}, source="talker")
    [output] = vocoder.run()[1]
    assert output.tensors["audio"].shape == (38 * 300,)
    vocoder.abort(1)


def test_input_without_features_gives_silence(vocoder: Any) -> None:
    vocoder.start(1, ("talker",))
    vocoder.feed(1, last=True, source="talker")
    [output] = vocoder.run()[1]
    assert (output.last, output.tensors) == (True, {})


ZEROS = {name: np.zeros((601, 2), np.float32) for name in NAMES}
F0 = np.zeros(4, np.float32)


@pytest.mark.parametrize(
    ("place", "tensors", "reason"),
    [
        ((0, 0), ZEROS, "lacks f0"),
        ((0, 0), {"f0": F0}, "lacks lh"),
        ((0, 2), ZEROS | {"f0": F0}, "frame 2 of sentence 0"),
        ((1, 0), ZEROS | {"f0": F0}, "frame 0 of sentence 1"),
        ((0, 0), ZEROS | {"f0": F0[:1]}, "do not fit"),
        ((0, 0), ZEROS | {"f0": F0.reshape(2, 2)}, "do not fit"),
        ((0, 0), ZEROS | {"f0": F0.astype(np.float64)}, "do not fit"),
        ((0, 0), ZEROS | {"f0": F0, "lh": np.zeros((600, 2), np.float32)}, "do not fit"),
        ((0, 0), ZEROS | {"f0": F0, "phi": np.zeros((601, 1), np.float32)}, "do not fit"),
        ((0, 0), ZEROS | {"f0": F0, "lh": np.float32(0)}, "do not fit"),
        ((0, 0), {name: a[:, :0] for name, a in ZEROS.items()} | {"f0": F0}, "do not fit"),
        ((0, 0), ZEROS | {"f0": np.full(4, np.nan, np.float32)}, "not finite"),
        ((0, 0), ZEROS | {"f0": F0, "lh": np.full((601, 2), np.inf, np.float32)}, "not finite"),
        ((0, 0), ZEROS | {"f0": np.zeros(40_000, np.float32)}, "the limit is 32768"),
    ],
)
def test_features_that_do_not_fit_are_refused(vocoder: Any, place: Any, tensors: Any, reason: str) -> None:
    vocoder.start(1, ("talker",))
    with pytest.raises(InvalidRequest, match=reason):
        vocoder.feed(1, {"sentence": place[0], "start": place[1]}, tensors, source="talker")
    vocoder.abort(1)


def test_input_that_ends_inside_a_sentence_is_refused(vocoder: Any) -> None:
    vocoder.start(1, ("talker",))
    with pytest.raises(InvalidRequest, match="in the middle of sentence 0"):
        vocoder.feed(1, {"sentence": 0, "start": 0}, ZEROS | {"f0": F0}, last=True, source="talker")
    vocoder.abort(1)


@pytest.mark.slow
def test_whisper_transcribes_the_spoken_text(acoustic: Any, vocoder: Any, drive: Callable[..., Any]) -> None:
    whisper = drive("whisper")
    for driver, source in ((acoustic, "client"), (vocoder, "talker"), (whisper, "client")):
        driver.start(1, (source,))
    text_in = "The capital of France is Paris, which is a large city."
    acoustic.feed(1, {"text": text_in}, last=True)
    for chunk in acoustic.run()[1]:
        vocoder.feed(1, chunk.data, chunk.tensors, last=chunk.last, source="talker")
    for chunk in vocoder.run()[1]:
        whisper.feed(1, {"sample_rate": 24000, "index": 0}, {"audio": chunk.tensors["audio"]}, last=chunk.last)
    text = "".join(output.data["text"] for output in whisper.run()[1])
    assert re.findall(r"\w+", text.lower()) == re.findall(r"\w+", text_in.lower())


@pytest.mark.parametrize("step", [1, 40])
def test_the_first_sound_of_a_sentence_has_its_text(vocoder: Any, voice: Any, step: int) -> None:
    """The second sentence continues the first, as phrases of a long sentence do: its text is empty."""
    texts = ["Who is there?", "", "It is me."]
    spoken = {"text": texts, "features": [features_of(voice, text or "Who?") for text in texts]}
    vocoder.start(1, ("talker",))
    outputs = []
    for sentence, (text, (*spectral, f0)) in enumerate(zip(*spoken.values(), strict=True)):
        for start in range(0, len(f0), step):
            tensors = {n: s[:, start : start + step] for n, s in zip(NAMES, spectral, strict=True)}
            data = {"sentence": sentence, "start": start, "frames": len(f0)}
            first = {} if start else {"f0": f0}
            last = sentence == 2 and start + step >= len(f0)
            vocoder.feed(1, data | ({} if start else {"text": text}), tensors | first, last=last, source="talker")
            outputs += vocoder.run().get(1, [])
    firsts = {}
    for output in outputs:
        firsts.setdefault(output.data["sentence"], output)
    named = [output for output in outputs if "sentence_text" in output.data]
    assert named == [firsts[0], firsts[2]]
    assert [output.data["sentence_text"] for output in named] == ["Who is there?", "It is me."]


def test_a_text_that_is_not_text_is_refused(vocoder: Any) -> None:
    vocoder.start(1, ("talker",))
    data = {"sentence": 0, "start": 0, "text": 3}
    with pytest.raises(InvalidRequest, match="not text"):
        vocoder.feed(1, data, ZEROS | {"f0": F0}, last=True, source="talker")
    vocoder.abort(1)
