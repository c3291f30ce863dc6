from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.hibari.acoustic import LONGEST_SCRIPT
from omni_actors.stages.hibari.text import LONGEST, SentenceReader
from tests.support.closeness import assert_close

pytestmark = pytest.mark.voice

SEA = "The sea was calm that morning, and the old fisherman rowed his small boat far out."
NAMES = ("lh", "theta", "ln", "lr", "phi")


@pytest.fixture(scope="session")
def voice() -> Any:
    """The reference: hibari itself."""
    from hibari import Hibari

    return Hibari(threads=1)


def features_of(voice: Any, text: str) -> list[Any]:
    """Return the network's lh, theta, ln, lr, phi and f0 for a sentence."""
    ids = np.asarray([voice.ids(voice.phonemize(text)[0])], np.int64)
    return [out[0] for out in voice.sess.run(None, {"ids": ids, "speed": np.ones(1, np.float32)})]


# sentences


def read(text: str, cuts: list[int] | None = None) -> list[str]:
    from hibari import Hibari

    reader = SentenceReader(Hibari.split_sentences)
    at = [0, *sorted(cut % (len(text) + 1) for cut in cuts or []), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(at)]
    return [sentence for piece in pieces for sentence in reader.feed(piece)] + reader.finish()


WORDS = st.lists(
    st.sampled_from(
        ["Hello", "dr", "Dr.", "J.", "it", "It", "is.", "Is!", "so,", "3.", "14", "\n", "-", "**x**", ":-)"]
    ),
    max_size=120,
).map(" ".join)


@given(text=WORDS, cuts=st.lists(st.integers(0, 10**6), max_size=12))
def test_sentences_do_not_depend_on_how_the_text_was_cut(text: str, cuts: list[int]) -> None:
    assert read(text, cuts) == read(text)


def test_a_sentence_is_returned_when_the_next_one_begins() -> None:
    from hibari import Hibari

    reader = SentenceReader(Hibari.split_sentences)
    returned = [reader.feed(piece) for piece in ("Dr. Smith is", " in. ", "H", "e is well.", "\n", "Good")]
    assert returned == [[], [], ["Dr. Smith is in."], [], [], ["He is well."]]
    assert reader.finish() == ["Good"]
    assert reader.finish() == []


def test_markdown_marks_are_removed() -> None:
    text = "# A *title*\n\n- **one** `thing`\n* another\n> quoted\n+ a - b\n1 - 2"
    assert read(text) == ["A title", "one thing", "another", "quoted", "a - b", "1 - 2"]


def test_a_long_sentence_is_cut_before_it_ends() -> None:
    from hibari import Hibari

    reader = SentenceReader(Hibari.split_sentences)
    clause = "and then it rained, "
    parts = reader.feed(clause * 40)
    assert len(parts) == 2
    assert all(part.endswith("rained,") and len(part) <= LONGEST for part in parts)
    assert " ".join([*parts, *reader.finish()]) == (clause * 40).strip()
    assert [len(part) for part in read("x" * (2 * LONGEST + 5))] == [LONGEST, LONGEST, 5]
    assert " ".join(read("word " * 200)) == ("word " * 200).strip()


@given(text=WORDS, spaces=st.lists(st.text(" \t\r\n\u2028", min_size=1, max_size=3), min_size=1, max_size=5))
def test_a_sequence_of_white_space_becomes_one_space_or_one_line_break(text: str, spaces: list[str]) -> None:
    words, gaps = text.split(), list(itertools.islice(itertools.cycle(spaces), len(text.split())))
    wide = "".join(word + gap for word, gap in zip(words, gaps, strict=True))
    narrow = "".join(word + ("\n" if "\n" in gap else " ") for word, gap in zip(words, gaps, strict=True))
    assert read(wide, [len(wide) // 2]) == read(narrow)


def test_little_text_is_held_back() -> None:
    from hibari import Hibari

    seen: list[int] = []

    def split(text: str) -> list[str]:
        seen.append(len(text))
        return list(Hibari.split_sentences(text))

    reader = SentenceReader(split)
    for piece in ("word", " ", "\n", "\t", "-") * 400:
        reader.feed(piece)
    for piece in ("\n", " ") * 1000:
        reader.feed(piece)
    assert max(seen) <= LONGEST + len(" word")


@pytest.mark.perf
@pytest.mark.parametrize("end", ["", "later! The end."], ids=["open", "complete"])
def test_cutting_a_long_text_takes_linear_time(end: str) -> None:
    """Ten times the length takes ten times as long. If each cut copied the rest, it would take 40 times and more."""

    def spent(words: int) -> float:
        text = "now " * words + end
        before = time.process_time()
        parts = read(text)
        after = time.process_time()
        assert max(map(len, parts)) <= LONGEST
        assert " ".join(parts) == text.strip()
        return after - before

    assert spent(1_000_000) < 25 * min(spent(100_000) for _ in range(3))


# the acoustic network


@pytest.fixture
def acoustic(drive: Callable[..., Any]) -> Any:
    return drive("hibari_acoustic")


def test_the_features_equal_the_networks_in_growing_chunks(acoustic: Any, voice: Any) -> None:
    acoustic.start(1)
    acoustic.feed(1, {"text": SEA}, last=True)
    outputs = acoustic.run()[1]
    *spectral, f0 = features_of(voice, SEA)
    frames = len(f0)
    assert 280 < frames <= 440
    assert [output.data["start"] for output in outputs] == [0, 40, 120, 280]
    assert {(output.data["sentence"], output.data["frames"]) for output in outputs} == {(0, frames)}
    assert [output.data.get("text") for output in outputs] == [SEA] + [None] * (len(outputs) - 1)
    assert [set(output.tensors) - set(NAMES) for output in outputs] == [{"f0"}] + [set()] * (len(outputs) - 1)
    assert_close(outputs[0].tensors["f0"], f0)
    for name, whole in zip(NAMES, spectral, strict=True):
        pieces = [output.tensors[name] for output in outputs]
        assert all(piece.flags.c_contiguous and piece.dtype == np.float32 for piece in pieces)
        assert_close(np.concatenate(pieces, axis=1), whole)


def test_a_sentence_is_computed_while_the_next_one_arrives(acoustic: Any) -> None:
    acoustic.start(1, ("thinker",))
    acoustic.feed(1, {"text": "It is late. Good"}, source="thinker")
    outputs = acoustic.run()[1]
    assert outputs[0].data["text"] == "It is late."
    assert not any(output.last for output in outputs)
    acoustic.feed(1, {"text": " night"}, source="thinker")
    assert not acoustic.engine.busy
    acoustic.feed(1, last=True, source="thinker")
    outputs = acoustic.run()[1]
    assert outputs[0].data["text"] == "Good night"
    assert outputs[0].data["sentence"] == 1


@pytest.mark.parametrize(
    ("pieces", "computed"),
    [
        (["It is late.", " Good", " night."], [1, 1, 2, 2]),
        (["It costs 3.", "14 dollars", "."], [1, 1, 2, 2]),
        (["Yes.", " Yes.", "  Yes", '."'], [1, 2, 2, 3, 3]),
        (["Wait!", '"', '"', " Go"], [1, 1, 1, 1, 2]),
    ],
    ids=["complete", "continued", "repeated", "same phonemes"],
)
def test_a_sentence_that_looks_complete_is_computed_speculatively(
    acoustic: Any, monkeypatch: pytest.MonkeyPatch, pieces: list[str], computed: list[int]
) -> None:
    """computed: how often the network has run after each piece and at the end. The outputs are always the same."""
    acoustic.start(1)
    acoustic.feed(1, {"text": "".join(pieces)}, last=True)
    at_once = acoustic.run()[1]
    runs: list[str] = []
    network = acoustic.engine._features
    monkeypatch.setattr(acoustic.engine, "_features", lambda *of: runs.append(of[0]) or network(*of))
    acoustic.start(2, ("thinker",))
    outputs, counts = [], []
    for piece in [*pieces, None]:
        acoustic.feed(2, {} if piece is None else {"text": piece}, source="thinker", last=piece is None)
        outputs += acoustic.run().get(2, [])
        counts.append(len(runs))
    assert counts == computed
    assert [output.data for output in outputs] == [output.data for output in at_once]
    for ours, whole in zip(outputs, at_once, strict=True):
        for name in whole.tensors:
            assert_close(ours.tensors[name], whole.tensors[name])


def test_complete_sentences_are_computed_before_speculative_ones(acoustic: Any) -> None:
    acoustic.start(1, ("thinker",))
    acoustic.feed(1, {"text": "Perhaps."}, source="thinker")
    acoustic.start(2)
    acoustic.feed(2, {"text": "Now."}, last=True)
    assert {output.request_id for output in acoustic.step()} == {2}
    assert list(acoustic.step()) == []
    assert not acoustic.engine.busy
    acoustic.abort(1)


def test_requests_take_turns_after_each_sentence(acoustic: Any) -> None:
    for request_id in (1, 2):
        acoustic.start(request_id)
        acoustic.feed(request_id, {"text": "One. Two. Three."}, last=True)
    turns = []
    while acoustic.engine.busy:
        [turn] = {(output.request_id, output.data["sentence"]) for output in acoustic.step()}
        turns.append(turn)
    assert turns == [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2)]


@pytest.mark.parametrize("text", [":-)", "...", "漢字 🙂", "** **\n\n`"])
def test_a_script_without_phonemes_fails_and_such_an_answer_ends_without_sound(acoustic: Any, text: str) -> None:
    acoustic.start(1)
    acoustic.feed(1, {"text": text}, last=True)
    acoustic.start(2, ("thinker",))
    acoustic.feed(2, {"text": text}, last=True, source="thinker")
    ended = acoustic.run()
    [failure] = ended[1]
    assert (failure.error.param, failure.error.code) == ("input", "nothing_to_speak")
    assert "English words, numbers" in failure.error.message
    [output] = ended[2]
    assert (output.last, output.tensors, output.data) == (True, {}, {})


def test_a_sentence_without_phonemes_is_left_out(acoustic: Any) -> None:
    acoustic.start(1)
    acoustic.feed(1, {"text": ":-)\nHello.\n:-)\nBye.\n:-)"}, last=True)
    outputs = acoustic.run()[1]
    assert [output.data["text"] for output in outputs if "text" in output.data] == ["Hello.", "Bye."]
    assert {output.data["sentence"] for output in outputs[:-1]} == {0, 1}


@pytest.mark.parametrize("pieces", [[""], ["  \n"], ["", " ", ""]])
def test_an_empty_script_is_refused(acoustic: Any, pieces: list[str]) -> None:
    acoustic.start(1)
    for text in pieces[:-1]:
        acoustic.feed(1, {"text": text})
    with pytest.raises(InvalidRequest) as refusal:
        acoustic.feed(1, {"text": pieces[-1]}, last=True)
    assert refusal.value.param == "input"
    acoustic.abort(1)


@pytest.mark.parametrize("sizes", [[LONGEST_SCRIPT + 1], [LONGEST_SCRIPT, 1]])
def test_a_script_beyond_the_limit_is_refused(acoustic: Any, sizes: list[int]) -> None:
    acoustic.start(1)
    for size in sizes[:-1]:
        acoustic.feed(1, {"text": "a" * size})
    with pytest.raises(
        InvalidRequest, match=rf"has at least {LONGEST_SCRIPT + 1} characters; the limit is {LONGEST_SCRIPT}"
    ) as refusal:
        acoustic.feed(1, {"text": "a" * sizes[-1]})
    assert (refusal.value.param, refusal.value.code) == ("input", "string_above_max_length")
    assert not acoustic.engine.busy
    acoustic.start(1)
    acoustic.abort(1)


@pytest.mark.parametrize(("source", "size"), [("client", LONGEST_SCRIPT), ("thinker", LONGEST_SCRIPT + 1)])
def test_a_script_of_the_longest_length_and_a_longer_answer_are_accepted(acoustic: Any, source: str, size: int) -> None:
    acoustic.start(1, (source,))
    acoustic.feed(1, {"text": "a" * size}, source=source)
    assert acoustic.engine.busy
    acoustic.abort(1)


def test_an_empty_answer_gives_silence(acoustic: Any) -> None:
    acoustic.start(1, ("thinker",))
    acoustic.feed(1, {"text": ""}, last=True, source="thinker")
    assert [output.last for output in acoustic.run()[1]] == [True]


def test_speed_changes_the_number_of_frames(acoustic: Any) -> None:
    frames = []
    for speed in (0.5, 1.0, 2.0):
        acoustic.start(1, speed=speed)
        acoustic.feed(1, {"text": "Good night."}, last=True)
        frames.append(acoustic.run()[1][0].data["frames"])
    slow, normal, fast = frames
    assert slow > 1.5 * normal > 1.5 * fast


def test_a_phrase_that_hibari_splits_counts_as_sentences(acoustic: Any, voice: Any) -> None:
    text = ", ".join(["77,777,777"] * 12) + "."
    parts = len(voice.phonemize(text))
    assert parts > 1
    acoustic.start(1)
    acoustic.feed(1, {"text": text}, last=True)
    outputs = acoustic.run()[1]
    assert {output.data["sentence"] for output in outputs} == set(range(parts))
    assert [output.data["text"] for output in outputs if "text" in output.data] == [text] + [""] * (parts - 1)


# the vocoder


@pytest.fixture
def vocoder(drive: Callable[..., Any]) -> Any:
    return drive("hibari_vocoder")


def vocode(vocoder: Any, sentences: list[list[Any]], step: int, **params: Any) -> list[Any]:
    """Return the audio of each sentence. Features are fed in chunks of ``step`` frames, with a step after each."""
    vocoder.start(1, ("talker",), **params)
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
    return [
        np.concatenate([o.tensors["audio"] for o in outputs if o.data.get("sentence") == sentence])
        for sentence in range(len(sentences))
    ]


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


# both stages


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
