"""token2wav, streamed: the samples of all codes at once, in any chunks, as soon as no code can change them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.checkpoint import WrongCheckpoint
from omni_actors.stages.qwen2_5.flow import FlowStream
from omni_actors.stages.qwen2_5.vocoder import Vocoder, VocoderStream
from tests.support.closeness import assert_same_sound
from tests.support.qwen2_5_reference import Codes, Reference, Wave, load
from tiny_models import qwen2_5 as tiny

pytestmark = pytest.mark.voice  # it needs the libraries of the extra; the weights are random

NAME = "qwen2_5_token2wav"
BLOCK_CODES = tiny.BLOCK // tiny.REPEATS
BLOCK_SAMPLES = BLOCK_CODES * tiny.SAMPLES
REACH = 1
"""Blocks that the vocoder looks ahead."""


def codes(count: int, seed: int = 0) -> Codes:
    return np.random.default_rng(seed).integers(0, tiny.CODES, count)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("qwen2_5"))


@pytest.fixture(scope="module")
def opened(checkpoint: Path, open_stage: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Return a function from options to an engine of ``checkpoint``, which it opens once. A test leaves it idle."""

    @functools.cache
    def get(**options: Any) -> Any:
        return stack.enter_context(closing(open_stage(NAME, checkpoint, **options)))

    with ExitStack() as stack:
        yield get


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return load(checkpoint)


def split(whole: Codes, size: int) -> list[Codes]:
    return [whole[at : at + size] for at in range(0, len(whole), size)]


def feed(driver: Any, request_id: int, chunks: list[Codes]) -> None:
    for number, chunk in enumerate(chunks):
        driver.feed(request_id, {}, {"codes": chunk.astype(np.int16)[:, None]}, last=number == len(chunks) - 1)


def sound(outputs: list[Any]) -> Wave:
    assert [output.last for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.data["sample_rate"] for output in outputs} == {24_000}
    return np.concatenate([np.zeros(0, np.float32), *(o.tensors["audio"] for o in outputs if o.tensors)])


@pytest.mark.parametrize(
    ("count", "options"),
    [
        pytest.param(200, {"steps": 4, "chunk_blocks": 1}, marks=pytest.mark.slow),
        pytest.param(110, {"steps": 2, "chunk_blocks": 2}, marks=pytest.mark.slow),
        pytest.param(168, {"steps": 2, "chunk_blocks": 7}, marks=pytest.mark.slow),  # whole blocks and whole chunks
        (90, {"steps": 2, "chunk_blocks": 1}),
        (30, {}),  # less than the look-ahead
        (5, {}),  # less than a block
        (1, {}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_streamed_samples_equal_those_of_all_codes_at_once(
    reference: Reference,
    opened: Callable[..., Any],
    drive: Any,
    count: int,
    options: dict[str, int],
) -> None:
    driver = drive(opened(**options))
    driver.start(1, speaker="Ethan", seed=7)
    feed(driver, 1, split(codes(count), 7))
    wave = sound(driver.run()[1])
    expected = reference.token2wav(codes(count), "Ethan", 7, options.get("steps", 10))
    assert np.abs(expected).max() > 0.05, "the expected wave is not silent"
    assert len(wave) == count * tiny.SAMPLES
    assert_same_sound(wave, expected)


@pytest.mark.parametrize(
    ("blocks", "resumed_from"),
    [(1, (12, 19)), *(pytest.param(*each, marks=pytest.mark.slow) for each in [(1, (0, 5, 21)), (3, (5,))])],
    ids=str,
)
def test_a_resumed_request_computes_what_the_first_needed_output_depends_on(
    opened: Callable[..., Any],
    drive: Any,
    monkeypatch: pytest.MonkeyPatch,
    blocks: int,
    resumed_from: tuple[int, ...],
) -> None:
    driver, spoken = drive(opened(steps=2, chunk_blocks=blocks)), codes(BLOCK_CODES * 20 + 5)

    def put_out(journaled: int) -> list[Any]:
        driver.start(1, speaker="Ethan", seed=7, journal=((),) * journaled, needed_from=journaled)
        feed(driver, 1, split(spoken, 50))
        outputs: list[Any] = driver.run()[1]
        sound(outputs)
        return outputs

    expected = put_out(0)
    assert len(expected) == -(-21 // blocks)
    pushed: list[int] = []
    push = FlowStream.push
    monkeypatch.setattr(FlowStream, "push", lambda *of, last: pushed.append(len(of[1])) or push(*of, last=last))
    for needed_from in resumed_from:
        pushed.clear()
        outputs = put_out(needed_from)
        assert len(outputs) == len(expected)
        assert not any(output.tensors for output in outputs[:needed_from])
        for output, before in zip(outputs[needed_from:], expected[needed_from:], strict=True):
            assert output.tensors["audio"].shape == before.tensors["audio"].shape
            assert_same_sound(output.tensors["audio"], before.tensors["audio"])
        context = 4 * 2 + REACH + blocks - 1  # an interval has 4 evaluations, and 2 layers look back
        assert sum(pushed) <= len(spoken) - (needed_from * blocks - context) * BLOCK_CODES


def test_a_block_is_put_out_once_no_code_can_change_it(
    reference: Reference, opened: Callable[..., Any], drive: Any
) -> None:
    """Each evaluation of the solver looks one block further ahead; an interval has 4."""
    ahead = 4 + REACH
    before, after = codes(BLOCK_CODES * (ahead + 1)), codes(60, 1)
    driver = drive(opened(steps=2, chunk_blocks=1))
    driver.start(1, speaker="Ethan", seed=7)
    driver.feed(1, {}, {"codes": before[:-1, None]})
    assert not driver.run()
    driver.feed(1, {}, {"codes": before[-1:, None]})
    (output,) = driver.run()[1]
    driver.abort(1)
    whole = np.concatenate([before, after])
    expected = reference.token2wav(whole, "Ethan", 7, 2)[:BLOCK_SAMPLES]
    rounding = 1e-3
    np.testing.assert_allclose(output.tensors["audio"], expected, rtol=0, atol=rounding)
    # The last block that it waits for changes it, so it could not have been put out a block earlier.
    whole[BLOCK_CODES * (ahead - 1) :] = after[0]
    changed = reference.token2wav(whole, "Ethan", 7, 2)[:BLOCK_SAMPLES]
    assert np.abs(changed - expected).max() > 2 * rounding


def test_the_vocoders_chunks_join_to_the_samples_of_the_whole() -> None:
    """With the real kernel sizes, whose reach is longer than that of the tiny ones."""
    real = {"resblock_kernel_sizes": [3, 7, 11], "resblock_dilation_sizes": [[1, 3, 5]] * 3}
    vocoder = Vocoder(tiny.build(**real).token2wav.code2wav_bigvgan_model.requires_grad_(requires_grad=False))
    assert vocoder.reach == 39
    stream, mel = VocoderStream(vocoder), torch.randn(130, 80, generator=torch.Generator().manual_seed(0)) * 3
    waves = []
    for at in range(0, 130, 10):
        stream.push(mel[at : at + 10])
        while (wave := stream.pop(24, last=at == 120)) is not None:
            waves.append(wave)
            assert len(waves) * 24 + 39 <= at + 10 or at == 120
    assert [len(wave) // vocoder.samples for wave in waves] == [24, 24, 24, 24, 24, 10]
    assert_same_sound(torch.cat(waves), vocoder.model(mel.T[None]))


def test_decode_reference_gives_the_references_samples(
    reference: Reference, opened: Callable[..., Any], drive: Any
) -> None:
    driver = drive(opened(decode="reference", steps=4))
    for number, (speaker, seed) in enumerate([("Chelsie", 0), ("Ethan", 2**63 - 1)]):
        driver.start(number, speaker=speaker.upper(), seed=seed)
        feed(driver, number, split(codes(55), 20))
        outputs = driver.run()[number]
        samples = [len(output.tensors["audio"]) for output in outputs]
        assert samples == [2 * BLOCK_SAMPLES, 2 * BLOCK_SAMPLES, 7 * tiny.SAMPLES]
        assert_same_sound(sound(outputs), reference.token2wav(codes(55), speaker, seed, 4))


@pytest.mark.slow
@given(seed=st.integers(0, 2**32))
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_requests_that_join_and_leave_get_the_samples_of_each_alone(
    reference: Reference, opened: Callable[..., Any], drive: Any, seed: int
) -> None:
    draw = random.Random(seed)  # Hypothesis's own draws may end an example in its middle, with requests in the engine
    inputs = {number: codes(draw.randrange(90), number) for number in range(draw.randrange(2, 5))}
    left = {number: split(spoken, draw.randrange(1, 40)) for number, spoken in inputs.items()}
    outputs: dict[int, list[Any]] = {number: [] for number in inputs}
    engine = opened(steps=2, chunk_blocks=draw.choice([1, 2, 7]))
    driver = drive(engine)
    for number in inputs:
        driver.start(number, speaker="Chelsie", seed=number)
    while left or engine.busy:
        if left and (not engine.busy or draw.random() < 0.5):
            number = draw.choice(sorted(left))
            chunk = left[number].pop(0) if left[number] else None
            driver.feed(number, {}, {} if chunk is None else {"codes": chunk[:, None]}, last=not left[number])
            if not left[number]:
                del left[number]
        else:
            for output in driver.step():
                outputs[output.request_id].append(output)
    for number, spoken in inputs.items():
        wave = sound(outputs[number])
        if len(spoken):
            assert_same_sound(wave, reference.token2wav(spoken, "Chelsie", number, 2))
        else:
            assert not len(wave)


def test_the_cuts_between_outputs_do_not_depend_on_when_codes_arrive(opened: Callable[..., Any], drive: Any) -> None:
    """The samples are equal to the bit, too, so a request can be replayed."""

    def chunks_of(size: int, *, at_once: bool) -> list[Any]:
        driver.start(1, seed=3)
        outputs: list[Any] = []
        for chunk in split(codes(107), size):
            driver.feed(1, {}, {"codes": chunk[:, None]})
            if not at_once:
                outputs += driver.run().get(1, [])
        driver.feed(1, last=True)
        outputs += driver.run()[1]
        return [(output.last, output.tensors["audio"].tobytes() if output.tensors else b"") for output in outputs]

    driver = drive(opened(steps=2, chunk_blocks=2))
    slowly = chunks_of(1, at_once=False)
    assert [len(audio) // 4 // tiny.SAMPLES for _, audio in slowly] == [24, 24, 24, 24, 11]
    assert chunks_of(107, at_once=True) == slowly
    assert chunks_of(50, at_once=False) == slowly


def test_the_seed_and_the_speaker_change_the_sound(opened: Callable[..., Any], drive: Any) -> None:
    driver = drive(opened(steps=2, chunk_blocks=2))

    def speech(**params: Any) -> bytes:
        driver.start(1, **params)
        feed(driver, 1, [codes(20)])
        return sound(driver.run()[1]).tobytes()

    assert speech(seed=1) == speech(seed=1, speaker="chelsie"), "the default speaker, in any case"
    assert len({speech(seed=1), speech(seed=2), speech(seed=1, speaker="Ethan"), speech(), speech()}) == 5
    with pytest.raises(InvalidRequest, match="'Cherry'; the model has Chelsie, Ethan") as caught:
        driver.start(1, speaker="Cherry")
    assert caught.value.param == "speaker"


def test_a_request_without_codes_ends_without_sound(opened: Callable[..., Any], drive: Any) -> None:
    """That happens if the talker's first code ends the speech."""
    for options in ({}, {"decode": "reference", "steps": 4}):
        engine = opened(**options)
        driver = drive(engine)
        driver.start(1)
        assert not engine.busy
        driver.feed(1, last=True)
        assert len(sound(driver.run()[1])) == 0


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (np.zeros((2, 2), np.int16), r"\(n, 1\)"),
        (np.zeros((0, 1), np.int16), r"\(n, 1\)"),
        (np.zeros(1, np.int16), r"\(n, 1\)"),
        (np.full((1, 1), tiny.TALKER_VOCABULARY + 1), "0 to 72 were expected, not 73"),
        (np.full((1, 1), -1), "not -1"),
        (np.zeros((1, 1), np.float32), "integers"),
        (np.zeros((2049, 1), np.int16), "2048 codes at most"),
    ],
)
def test_invalid_codes_are_refused(opened: Callable[..., Any], drive: Any, found: Any, message: str) -> None:
    engine = opened()
    driver = drive(engine)
    driver.start(1)
    driver.live.discard(1)
    with pytest.raises(InvalidRequest, match=message) as caught:
        driver.feed(1, {}, {"codes": found})
    assert caught.value.param == "codes"
    assert not engine.busy


def test_missing_weights_are_listed_when_the_stage_loads(
    checkpoint: Path, tmp_path: Path, open_stage: Callable[..., Any]
) -> None:
    for name in ("config.json", "spk_dict.pt"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    weights = load_file(checkpoint / "model.safetensors")
    own = {name: tensor for name, tensor in weights.items() if name.startswith("token2wav.")}
    assert 0 < len(own) < len(weights)
    save_file(own, tmp_path / "model.safetensors", {"format": "pt"})
    open_stage(NAME, tmp_path).close()
    del own["token2wav.code2wav_dit_model.proj_out.weight"]
    save_file(own, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        WrongCheckpoint, match=r"part 'token2wav': there are no weights for code2wav_dit_model\.proj_out"
    ):
        open_stage(NAME, tmp_path)
