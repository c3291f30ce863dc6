"""BAGEL's engines among themselves: one stage and two, batches, checkpoints, previews, large contexts."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from omni_actors.stages.base import CLIENT, Chunk, InvalidRequest, StageCheckpoint, StageOutput, StageRequest
from omni_actors.stages.multimodal.limits import MediaLimits
from ringbuf import Ring, decode_bundle, encode_bundle
from tests.stages.bagel import cases
from tests.stages.bagel.driving import Bagel, chunks_of, context, params_of
from tests.support.closeness import assert_same_picture
from tests.support.conformance import reachable
from tests.support.engine_driver import Driver

pytestmark = pytest.mark.voice

NAMES = ["plain", "text guidance", "edit", "interleaved"]


@pytest.fixture(scope="module")
def one_stage(tiny_bagel: Path) -> Any:
    from omni_actors.stages.bagel.one_stage import OneStageEngine

    return OneStageEngine(context(tiny_bagel, "bagel"))


def submit(driver: Driver, request_id: int, case: dict[str, Any], **more: Any) -> None:
    """Start and feed a request to the engine in one stage. more: parameters, and what an earlier incarnation left."""
    driver.start(request_id, **params_of(case), **more)
    chunks = chunks_of(case["terms"])
    for i, chunk in enumerate(chunks):
        driver.feed(request_id, *chunk, last=i == len(chunks) - 1)


def latents_of(events: list[Any]) -> list[Any]:
    return [event.tensors["latents"] for event in events if isinstance(event, StageCheckpoint)]


def pictures_of(events: list[Any]) -> list[Any]:
    return [event.tensors["image"] for event in events if isinstance(event, StageOutput)]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(cases.PICTURES["edit"], id="edit"),
        pytest.param(cases.PICTURES["thought"], id="thought"),
        pytest.param({"terms": [cases.FIRST], "guidance": 4.0, "image_guidance": 2.0}, id="picture without text"),
    ],
)
def test_one_stage_draws_what_two_stages_draw(bagel: Bagel, one_stage: Any, case: dict[str, Any]) -> None:
    outputs, checkpoints = bagel.draw(case["terms"], **params_of(case))
    submit(Driver(one_stage), 1, case)
    events: list[Any] = []
    while one_stage.busy:
        events += one_stage.step()
    for found, expected in zip(latents_of(events), latents_of(checkpoints), strict=True):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(events[-1].tensors["image"], outputs[-1].tensors["image"])
    assert events[-1].last


def test_a_picture_is_drawn_from_the_text_that_the_client_gets(bagel: Bagel) -> None:
    """What ends the text and is not in it is not read again either."""
    case = cases.PICTURES["thought"]
    terms, params = case["terms"], params_of(case)
    bagel.draw(terms, **params)
    thoughts, decode = bagel.thoughts, bagel.reader.engine._vocabulary.decode
    length = next(n for n, token in enumerate(thoughts) if n and decode([token]).isalpha())
    end = thoughts[length]
    expected, _ = bagel.draw(terms, **{**params, "max_tokens": length})
    for ending in ({"stop": [decode([end])]}, {"stop_token_ids": [end]}):
        outputs, _ = bagel.draw(terms, **params, **ending)
        assert bagel.thoughts == thoughts[: length + 1]
        np.testing.assert_array_equal(outputs[-1].tensors["image"], expected[-1].tensors["image"])


@pytest.mark.parametrize("name", ["edit", "thought"])
def test_one_stage_goes_on_from_the_checkpoint(one_stage: Any, name: str) -> None:
    """The checkpoint is valid in ``start`` only, and the picture begins some steps later."""
    case = cases.PICTURES[name]
    submit(driver := Driver(one_stage), 1, case, previews=1)
    outputs: list[Any] = []
    while not outputs or outputs[-1].data.get("step") != 2:
        outputs += driver.step()
    checkpoint, journal = driver.checkpoints[1], tuple(output.decisions for output in outputs)
    outputs += driver.run()[1]
    assert checkpoint.data == {"step": 2}
    submit(driver, 2, case, previews=1, journal=journal, checkpoint=checkpoint)
    events: list[Any] = []
    while one_stage.busy:
        events += one_stage.step()
    again = [event for event in events if isinstance(event, StageOutput)]
    assert [output.decisions for output in again] == [output.decisions for output in outputs]
    np.testing.assert_array_equal(again[-1].tensors["image"], outputs[-1].tensors["image"])
    assert len(latents_of(events)) == cases.STEPS - 1 - 2


def test_a_text_keeps_no_second_copy_of_its_prompt(bagel: Bagel) -> None:
    bagel.reader.start(3, downstream=False, max_tokens=4)
    bagel.reader.feed(3, *chunks_of([cases.WORDS])[0], last=True)
    bagel.reader.step()
    assert bagel.reader.live == {3}
    assert "Reader" not in reachable(bagel.reader.engine)
    bagel.reader.run()


def test_a_mixed_batch_draws_what_each_request_draws_alone(bagel: Bagel) -> None:
    alone = [bagel.draw(cases.PICTURES[name]["terms"], **params_of(cases.PICTURES[name])) for name in NAMES]
    for number, name in enumerate(NAMES):
        case = cases.PICTURES[name]
        bagel.start(10 + number, case["terms"], **params_of(case))
    together = bagel.run()
    for number, (outputs, checkpoints) in enumerate(alone):
        events = together[10 + number]
        for found, expected in zip(latents_of(events), latents_of(checkpoints), strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
        assert_same_picture(pictures_of(events)[-1], outputs[-1].tensors["image"])


@pytest.mark.parametrize("step", range(1, cases.STEPS))
def test_a_new_incarnation_goes_on_from_the_checkpoint(bagel: Bagel, step: int) -> None:
    """It computes the steps behind the checkpoint only, and puts out the previews before it without a picture."""
    case = cases.PICTURES["edit"]
    params = {**params_of(case), "previews": 1}
    outputs, checkpoints = bagel.draw(case["terms"], **params)
    assert [output.data["step"] for output in outputs] == [1, 2, 3, 4]
    own = {name: value for name, value in params.items() if name not in Bagel.ONLY_DENOISER}
    bagel.reader.start(2, **own)
    bagel._feed(2, case["terms"])
    checkpoint = StageCheckpoint(2, checkpoints[step - 1].tensors, checkpoints[step - 1].data)
    journal = tuple(output.decisions for output in outputs[:step])
    painted = {name: params[name] for name in params if name in Bagel.OF_DENOISER}
    bagel.painter.start(2, ("context",), journal=journal, needed_from=step, checkpoint=checkpoint, **painted)
    events = bagel.run()[2]
    again = [event for event in events if isinstance(event, StageOutput)]
    assert [output.decisions for output in again] == [output.decisions for output in outputs]
    assert all(not output.tensors for output in again[:step])
    np.testing.assert_array_equal(again[-1].tensors["image"], outputs[-1].tensors["image"])
    assert len(latents_of(events)) == cases.STEPS - 1 - step


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"size": "30x32"}, "size"),
        ({"size": "0x32"}, "size"),
        ({"size": "4096x32"}, "size"),
        ({"guidance": float("nan")}, "guidance"),
        ({"guidance": -1.0}, "guidance"),
        ({"seed": 2**70}, "seed"),
    ],
)
def test_a_wrong_parameter_of_the_context_is_named(bagel: Bagel, params: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        bagel.reader.engine.start(_request(params))
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"steps": 0}, "steps"),
        ({"steps": 10_000}, "steps"),
        ({"renorm": "none"}, "renorm"),
        ({"strength": 0.5}, "strength"),
        ({"image_guidance": float("inf")}, "image_guidance"),
    ],
)
def test_a_wrong_parameter_of_the_denoiser_is_named(bagel: Bagel, params: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        bagel.painter.engine.start(_request(params))
    assert refused.value.param == param


def test_pictures_that_take_long_to_decode_are_refused(bagel: Bagel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bagel.reader.engine, "LIMITS", MediaLimits(decode_s=1e-9))
    bagel.reader.start(5)
    [picture, words] = chunks_of([cases.FIRST, "a boat"])
    bagel.reader.feed(5, *picture)
    with pytest.raises(InvalidRequest) as refused:
        bagel.reader.feed(5, *words, last=True)
    assert (refused.value.param, refused.value.code) == ("image", "image_too_slow")


def _request(params: dict[str, Any]) -> Any:
    return StageRequest(9, (CLIENT,), params)


@pytest.mark.parametrize(
    ("chunk", "param"),
    [
        (({"messages": [{"role": "user", "content": "the sea " * 8000}]}, {}), "messages"),
        (({"messages": [{"role": "user", "content": ""}]}, {}), "messages"),
        (({"messages": [{"role": "user", "content": [{"type": "image", "index": 3}]}]}, {}), "image"),
        (({"messages": [{"role": "user", "content": [{"type": "audio", "index": 0}]}]}, {}), "messages"),
        (({"index": 0}, {"image": np.zeros((1, 3000, 3), np.uint8)}), "image"),
        (({"prompt": "the sea"}, {}), "prompt"),
    ],
)
def test_an_unusable_prompt_is_refused(bagel: Bagel, chunk: Any, param: str) -> None:
    bagel.reader.start(5)
    try:
        with pytest.raises(InvalidRequest) as refused:
            bagel.reader.feed(5, *chunk, last=True)
        assert refused.value.param == param
    finally:
        bagel.reader.abort(5)


def test_texts_that_are_too_long_together_are_refused_before_they_are_tokenized(
    bagel: Bagel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = bagel.reader.engine
    text = "a" * (engine._context * engine._vocabulary.longest // 2)
    monkeypatch.setattr(type(engine._vocabulary.tokenizer), "encode", None)
    bagel.reader.start(5)
    [words] = chunks_of([text, text])
    with pytest.raises(InvalidRequest, match="context holds") as refused:
        bagel.reader.feed(5, *words, last=True)
    assert refused.value.code == "context_length_exceeded"


def test_an_option_without_effect_is_refused(tiny_bagel: Path) -> None:
    from omni_actors.stages.bagel.context import ContextEngine

    with pytest.raises(ValueError, match="prefix_cache_mb: this engine has no cache"):
        ContextEngine(context(tiny_bagel, "context", prefix_cache_mb=1))


@pytest.mark.parametrize(
    "medium",
    [
        ({"index": 0}, {"image": np.zeros((48, 64, 3), np.uint8)}),
        ({"index": 0, "sample_rate": 16000}, {"audio": np.zeros(16000, np.float32)}),
    ],
)
def test_a_medium_without_a_place_is_refused(bagel: Bagel, medium: Any) -> None:
    bagel.reader.start(5)
    bagel.reader.feed(5, *medium)
    [words] = chunks_of(["a boat"])
    with pytest.raises(InvalidRequest, match=r"no message refers to (image|audio) 0, which was sent") as refused:
        bagel.reader.feed(5, *words, last=True)
    assert refused.value.param == "messages"


def test_a_repetition_penalty_counts_the_tokens_of_the_prompt(bagel: Bagel) -> None:
    """A strong reward of repetition leaves tokens that the context has: those of the text and its marks."""
    engine: Any = bagel.reader.engine
    text = "zebra"
    tokens = {*engine._vocabulary.tokenizer.encode(text), engine._marks.text_start, engine._marks.text_end}
    written = bagel.write([text], max_tokens=4, repetition_penalty=0.1)
    assert {token for output in written for token in output.decisions} <= tokens


def large_contexts(length: int) -> Any:
    """Contexts of this length in the three layers of a model with 8 heads of 64 numbers."""
    import torch

    from omni_actors.stages.bagel.contexts import Contexts, Mark

    states = [(torch.rand(8, length, 64), torch.rand(8, length, 64)) for _ in range(3)]
    mark = Mark(length, 3)
    return Contexts(
        full=mark,
        textless=Mark(2, 1),
        imageless=mark,
        states=states,
        imageless_states=None,
        edits=False,
        width=32,
        height=32,
        noise=torch.rand(16, 16),
    )


def test_large_contexts_pass_through_a_ring(bagel: Bagel) -> None:
    """50 MB in chunks of a layer each, through a ring that is smaller than a chunk."""
    import torch

    from omni_actors.stages.bagel import handoff
    from omni_actors.stages.bagel.config import LanguageConfig

    contexts = large_contexts(4096)
    sizes = {"vocab_size": 9, "hidden_size": 512, "intermediate_size": 9}
    language = LanguageConfig(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=8, **sizes)
    config = msgspec.structs.replace(bagel.painter.engine._model.config, language=language)  # type: ignore[attr-defined]
    receiver, received = handoff.Receiver(config), None
    chunks = [*handoff.chunks(contexts)]
    with Ring.create(8 * 1024 * 1024) as ring, ThreadPoolExecutor(1) as sender:
        producer, consumer = ring.claim_producer(), ring.claim_consumer()

        def send() -> None:
            for data, tensors in chunks:
                producer.send(*encode_bundle(data, tensors))

        started = time.perf_counter()
        sending = sender.submit(send)
        for i in range(len(chunks)):
            with consumer.recv() as frame:
                bundle = decode_bundle(frame.data)
                chunk = Chunk("context", i, i == len(chunks) - 1, bundle.tensors, bundle.meta or {})
                received = receiver.feed(chunk)
                del bundle, chunk
        sending.result()
    size = sum(keys.nbytes + values.nbytes for keys, values in contexts.states)
    print(f"{size / 1e6:.0f} MB, {size / (time.perf_counter() - started) / 1e9:.2f} GB/s")
    assert received is not None
    for found, expected in zip(received.states, contexts.states, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert torch.equal(received.noise, contexts.noise)


def test_new_weights_draw_what_a_new_engine_with_them_draws(tiny_bagel: Path, bagel: Bagel, tmp_path: Path) -> None:
    from tiny_models import bagel as tiny

    other = tiny.save(tmp_path / "other", seed=1)
    case = cases.PICTURES["plain"]
    before = bagel.draw(case["terms"], **params_of(case))[0][-1].tensors["image"]

    def load(directory: Path) -> Any:
        found = {}
        for file in (directory / "ema.safetensors", directory / "ae.safetensors"):
            found[str(file)] = (file.stat().st_size, file.stat().st_mtime_ns)
        for driver in (bagel.reader, bagel.painter):
            done = driver.engine.call("update_weights", {"files": found, "version": None})  # type: ignore[attr-defined]
            assert done["complete"]
        return bagel.draw(case["terms"], **params_of(case))[0][-1].tensors["image"]

    assert not np.array_equal(load(other), before)
    np.testing.assert_array_equal(load(tiny_bagel), before)


def test_bfloat16_draws_nearly_the_same(tiny_bagel: Path, bagel: Bagel) -> None:
    """No operation mixes dtypes, and what is computed in float32 stays there: latents and checkpoints."""
    from omni_actors.stages.bagel.context import ContextEngine
    from omni_actors.stages.bagel.denoiser import DenoiserEngine

    half = {"dtype": "bfloat16"}
    engines = ContextEngine(context(tiny_bagel, "context", **half)), DenoiserEngine(context(tiny_bagel, "d", **half))
    case = cases.PICTURES["edit without image guidance"]
    _, expected = bagel.draw(case["terms"], **params_of(case))
    outputs, checkpoints = Bagel(*engines).draw(case["terms"], **params_of(case))
    assert outputs[-1].tensors["image"].shape == (32, 40, 3)
    assert checkpoints[-1].tensors["latents"].dtype == np.float32
    correlation = np.corrcoef(*(np.ravel(each[-1].tensors["latents"]) for each in (checkpoints, expected)))[0, 1]
    assert correlation > 0.98
    assert Bagel(*engines).write([cases.WORDS], max_tokens=3)[-1].last
