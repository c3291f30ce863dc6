"""code2wav, streamed: the samples of all frames at once, in any chunks."""

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
from tests.support.closeness import assert_same_sound
from tiny_models import qwen3 as tiny

pytestmark = pytest.mark.voice  # it needs the libraries of the extra; the weights are random

TAIL = 555
"""The samples that are missing at the end: a transposed convolution makes none of its first input."""
REAL_WINDOW = {"sliding_window": 72, "num_hidden_layers": 8}
Codes = np.ndarray[Any, np.dtype[np.int64]]


def frames(count: int, seed: int = 0) -> Codes:
    return np.random.default_rng(seed).integers(0, tiny.CODEBOOK, (count, tiny.GROUPS))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def opened(checkpoint: Path, open_stage: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Return a function from options to an engine of ``checkpoint``, which it opens once. A test leaves it idle."""

    @functools.cache
    def get(**options: Any) -> Any:
        return stack.enter_context(closing(open_stage("qwen3_code2wav", checkpoint, **options)))

    with ExitStack() as stack:
        yield get


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' own code2wav, with the weights of ``checkpoint``."""
    return tiny.build().code2wav


@functools.cache
def together(model: Any, count: int) -> np.ndarray[Any, Any]:
    """Return the samples of ``frames(count)`` in one forward, computed once per count."""
    return forward(model, frames(count))


def forward(model: Any, codes: Codes) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        wave: np.ndarray[Any, Any] = model(torch.from_numpy(codes.T[None].copy()))[0, 0].numpy()
    return wave


def pieces(codes: Codes, size: int) -> list[Codes]:
    return [codes[at : at + size] for at in range(0, len(codes), size)]


def feed(driver: Any, request_id: int, chunks: list[Codes]) -> None:
    for number, codes in enumerate(chunks):
        driver.feed(request_id, {}, {"codes": codes.astype(np.int16)}, last=number == len(chunks) - 1)


def sound(outputs: list[Any]) -> np.ndarray[Any, Any]:
    assert [output.last for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.data["sample_rate"] for output in outputs} == {24_000}
    return np.concatenate([np.zeros(0, np.float32), *(o.tensors["audio"] for o in outputs if o.tensors)])


@pytest.mark.parametrize(
    ("count", "chunk_frames"),
    [
        *(pytest.param(60, (1,), marks=pytest.mark.slow), (60, (4,)), (320, (25,))),
        *(pytest.param(320, (300,), marks=pytest.mark.slow), (60, (2, 4, 8, 16, 25))),
    ],
    ids=str,
)
def test_streamed_samples_equal_those_of_one_forward(
    reference: Any, opened: Callable[..., Any], drive: Any, count: int, chunk_frames: tuple[int, ...]
) -> None:
    driver = drive(opened(chunk_frames=chunk_frames))
    driver.start(1)
    feed(driver, 1, pieces(frames(count), 7))
    outputs = driver.run()[1]
    expected = together(reference, count)
    assert np.sqrt(np.mean(expected**2)) > 0.05, "the expected wave is not silent"
    assert len(sound(outputs)) == count * 1920 - TAIL
    assert_same_sound(sound(outputs), expected)
    samples = [len(output.tensors["audio"]) for output in outputs if output.tensors]
    assert samples[0] == chunk_frames[0] * 1920 - TAIL
    assert all(chunk <= chunk_frames[-1] * 1920 for chunk in samples)


@pytest.mark.slow
def test_streamed_samples_equal_those_of_one_forward_at_the_real_window_and_depth(
    tmp_path: Path, open_stage: Callable[..., Any], drive: Any
) -> None:
    """The reference's 25 frames of left context are far too few here."""
    codes = frames(120)
    model = tiny.build(**REAL_WINDOW).code2wav
    with closing(open_stage("qwen3_code2wav", tiny.save(tmp_path, **REAL_WINDOW), chunk_frames=(4,))) as engine:
        driver = drive(engine)
        driver.start(1)
        feed(driver, 1, [codes])
        assert_same_sound(sound(driver.run()[1]), together(model, 120))
    with torch.no_grad():
        again = model(torch.from_numpy(codes[75:].T[None].copy()))[0, 0].numpy()[25 * 1920 :]
    assert np.abs(again - together(model, 120)[100 * 1920 :]).max() > 0.01


def test_decode_reference_gives_the_references_samples(reference: Any, opened: Callable[..., Any], drive: Any) -> None:
    codes = frames(310)
    driver = drive(opened(decode="reference"))
    driver.start(1)
    feed(driver, 1, pieces(codes, 100))
    (output,) = driver.run()[1]
    with torch.no_grad():
        expected = reference.chunked_decode(torch.from_numpy(codes.T[None].copy()), 300, 25)[0, 0].numpy()
    assert_same_sound(output.tensors["audio"], expected)


@pytest.mark.slow
@given(seed=st.integers(0, 2**32))
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_requests_that_join_and_leave_get_the_samples_of_each_alone(
    reference: Any, opened: Callable[..., Any], drive: Any, seed: int
) -> None:
    draw = random.Random(seed)  # Hypothesis's own draws may end an example in its middle, with requests in the engine
    inputs = {number: frames(draw.randrange(41), number) for number in range(draw.randrange(2, 6))}
    left = {number: pieces(codes, draw.randrange(1, 10)) for number, codes in inputs.items()}
    outputs: dict[int, list[Any]] = {number: [] for number in inputs}
    engine = opened(max_batch=draw.choice([1, 3, 8]))
    driver = drive(engine)
    for number in inputs:
        driver.start(number)
    while left or engine.busy:
        if left and (not engine.busy or draw.random() < 0.5):
            number = draw.choice(sorted(left))
            chunk = left[number].pop(0) if left[number] else None
            driver.feed(number, {}, {} if chunk is None else {"codes": chunk}, last=not left[number])
            if not left[number]:
                del left[number]
        else:
            for output in driver.step():
                outputs[output.request_id].append(output)
    for number, codes in inputs.items():
        wave = sound(outputs[number])
        assert len(wave) == max(0, len(codes) * 1920 - TAIL)
        if len(wave):
            assert_same_sound(wave, forward(reference, codes))


@pytest.fixture(scope="module")
def short_sighted(tmp_path_factory: pytest.TempPathFactory, open_stage: Callable[..., Any]) -> Iterator[Any]:
    """Return an engine whose samples depend on few frames."""
    model = tiny.save(tmp_path_factory.mktemp("short"), sliding_window=8, num_hidden_layers=3)
    with closing(open_stage("qwen3_code2wav", model, chunk_frames=(2, 4, 8))) as engine:
        yield engine


@pytest.mark.parametrize("needed_from", [*(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 14, 15)), 5, 16])
def test_a_resumed_request_goes_on_from_the_first_needed_output(
    short_sighted: Any, drive: Any, monkeypatch: pytest.MonkeyPatch, needed_from: int
) -> None:
    driver, codes, other = drive(short_sighted), frames(120), frames(30, 1)
    driver.start(1)
    feed(driver, 1, pieces(codes, 7))
    expected = driver.run()[1]
    assert len(expected) == 17

    decoder, transformed, convolved = short_sighted._stream, list[int](), list[int]()
    transform, convolve = decoder._transform, decoder._convolve
    monkeypatch.setattr(decoder, "_transform", lambda *of: transformed.append(of[0].shape[2]) or transform(*of))
    monkeypatch.setattr(decoder, "_convolve", lambda *of: convolved.append(of[0].shape[1]) or convolve(*of))
    driver.start(1, journal=((),) * needed_from, needed_from=needed_from)
    feed(driver, 1, pieces(codes, 50))
    outputs = driver.run()[1]
    assert [output.last for output in outputs] == [output.last for output in expected]
    assert not any(output.tensors for output in outputs[:needed_from])
    assert {output.data["sample_rate"] for output in outputs} == {24_000}
    for output, before in zip(outputs[needed_from:], expected[needed_from:], strict=True):
        assert output.tensors["audio"].shape == before.tensors["audio"].shape
        assert_same_sound(output.tensors["audio"], before.tensors["audio"])
    needed = 120 - sum((2, 4, *[8] * 14)[:needed_from])
    assert decoder.reach == 3 * 7 + 10
    assert sum(transformed) <= needed + decoder.reach
    assert sum(convolved) <= needed + 10

    driver.start(1, journal=((),) * needed_from, needed_from=needed_from)
    driver.start(2)
    feed(driver, 1, pieces(codes, 7))
    feed(driver, 2, [other])
    both = driver.run()
    assert_same_sound(sound(both[2]), forward_alone(driver, other))
    for output, before in zip(both[1][needed_from:], expected[needed_from:], strict=True):
        assert_same_sound(output.tensors["audio"], before.tensors["audio"])


def forward_alone(driver: Any, codes: Codes) -> np.ndarray[Any, Any]:
    driver.start(9)
    feed(driver, 9, [codes])
    return sound(driver.run()[9])


@pytest.mark.parametrize("options", [{}, {"decode": "reference"}], ids=str)
def test_a_resumed_request_whose_client_has_all_ends_again(
    opened: Callable[..., Any], drive: Any, options: dict[str, str]
) -> None:
    driver = drive(opened(**options))
    driver.start(1)
    feed(driver, 1, [frames(2)])
    count = len(driver.run()[1])
    driver.start(1, journal=((),) * count, needed_from=count)
    feed(driver, 1, [frames(2)])
    outputs = driver.run()[1]
    assert len(outputs) == count
    assert len(sound(outputs)) == 0


def test_a_resumed_request_can_be_aborted_while_it_is_passing_over(short_sighted: Any, drive: Any) -> None:
    driver = drive(short_sighted)
    driver.start(1, journal=((),) * 9, needed_from=9)
    driver.feed(1, {}, {"codes": frames(20)})
    assert [output.tensors for output in driver.run()[1]] == [{}, {}, {}]
    driver.abort(1)
    assert not driver.engine.busy


def test_the_cuts_between_outputs_do_not_depend_on_when_frames_arrive(opened: Callable[..., Any], drive: Any) -> None:
    """Each request has a forward of its own, so its samples are equal to the bit and it can be replayed."""

    def chunks_of(size: int, *, at_once: bool) -> list[Any]:
        driver.start(1)
        outputs: list[Any] = []
        for codes in pieces(frames(31), size):
            driver.feed(1, {}, {"codes": codes})
            if not at_once:
                outputs += driver.run().get(1, [])
        driver.feed(1, last=True)
        outputs += driver.run()[1]
        return [(output.last, output.tensors["audio"].tobytes() if output.tensors else b"") for output in outputs]

    driver = drive(opened())
    slowly = chunks_of(1, at_once=False)
    assert [len(audio) // 4 // 1920 + 1 for _, audio in slowly] == [2, 5, 9, 17, 2]  # a frame's samples, and more
    assert chunks_of(31, at_once=True) == slowly
    assert chunks_of(5, at_once=False) == slowly


def test_a_request_without_frames_ends_without_sound(opened: Callable[..., Any], drive: Any) -> None:
    """That happens if the talker's first code ends the speech."""
    for options in ({}, {"decode": "reference"}):
        engine = opened(**options)
        driver = drive(engine)
        driver.start(1)
        assert not engine.busy
        driver.feed(1, last=True)
        assert len(sound(driver.run()[1])) == 0


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (np.zeros((2, tiny.GROUPS + 1), np.int16), r"\(n, 4\)"),
        (np.zeros((0, tiny.GROUPS), np.int16), r"\(n, 4\)"),
        (np.zeros(tiny.GROUPS, np.int16), r"\(n, 4\)"),
        (np.full((1, tiny.GROUPS), tiny.CODEBOOK), "0 to 63 were expected, not 64"),
        (np.full((1, tiny.GROUPS), -1), "not -1"),
        (np.zeros((1, tiny.GROUPS), np.float32), "integers"),
    ],
)
def test_invalid_codes_are_refused(opened: Callable[..., Any], drive: Any, codes: Any, message: str) -> None:
    engine = opened()
    driver = drive(engine)
    driver.start(1)
    driver.live.discard(1)
    with pytest.raises(InvalidRequest, match=message) as caught:
        driver.feed(1, {}, {"codes": codes})
    assert caught.value.param == "codes"
    assert not engine.busy


def test_missing_weights_are_listed_when_the_stage_loads(
    checkpoint: Path, tmp_path: Path, open_stage: Callable[..., Any]
) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    weights = load_file(checkpoint / "model.safetensors")
    own = {name: tensor for name, tensor in weights.items() if name.startswith("code2wav.")}
    assert 0 < len(own) < len(weights)
    save_file(own, tmp_path / "model.safetensors", {"format": "pt"})
    open_stage("qwen3_code2wav", tmp_path).close()
    del own["code2wav.code_embedding.weight"]
    save_file(own, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WrongCheckpoint, match=r"part 'code2wav': there are no weights for code_embedding\.weight"):
        open_stage("qwen3_code2wav", tmp_path)


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path, open_stage: Callable[..., Any]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(WrongCheckpoint, match=r"part 'code2wav': a llama model has no configuration of it"):
        open_stage("qwen3_code2wav", tmp_path)
