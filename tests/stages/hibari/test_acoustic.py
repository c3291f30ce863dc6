"""The acoustic network: features of each sentence, and which scripts are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.hibari.acoustic import LONGEST_SCRIPT
from tests.stages.hibari.features import NAMES, SEA, features_of
from tests.support.closeness import assert_close

pytestmark = pytest.mark.voice


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


def test_a_resumed_request_computes_no_sentence_whose_outputs_are_not_needed(
    acoustic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"Hush. {SEA} :-) Who is there?"
    runs: list[str] = []
    network = acoustic.engine._features
    monkeypatch.setattr(acoustic.engine, "_features", lambda *of: runs.append(of[0]) or network(*of))

    def put_out(journal: Any, pieces: list[str]) -> list[Any]:
        acoustic.start(1, ("thinker",), journal=journal, needed_from=len(journal))
        outputs = []
        for piece in pieces:
            acoustic.feed(1, {"text": piece}, source="thinker")
            outputs += acoustic.run().get(1, [])
        acoustic.feed(1, last=True, source="thinker")
        return [*outputs, *acoustic.run()[1]]

    expected = put_out((), [text])
    assert [output.data["sentence"] for output in expected] == [0, 0, 1, 1, 1, 1, 2, 2]
    sentences = runs[:]
    for needed_from in range(len(expected) + 1):
        runs.clear()
        outputs = put_out(tuple(output.decisions for output in expected[:needed_from]), [text[:3], text[3:]])
        assert [(o.decisions, o.last) for o in outputs] == [(o.decisions, o.last) for o in expected]
        for output, before in zip(outputs[needed_from:], expected[needed_from:], strict=True):
            assert output.data == before.data
            for name in before.tensors:
                assert_close(output.tensors[name], before.tensors[name])
        needed = {output.data["sentence"] for output in expected[needed_from:]}
        assert set(runs) == {sentences[number] for number in needed}


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


def test_a_script_of_sentences_without_phonemes_does_not_delay_another(acoustic: Any) -> None:
    acoustic.start(1)
    acoustic.feed(1, {"text": ":-)\n" * 9}, last=True)
    acoustic.start(2)
    acoustic.feed(2, {"text": "Hello."}, last=True)
    assert list(acoustic.step()) == []
    assert {output.request_id for output in acoustic.step()} == {2}
    steps = 0
    while acoustic.engine.busy:
        outputs = list(acoustic.step())
        steps += 1
    assert steps == 8
    assert outputs[0].error.code == "nothing_to_speak"


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
