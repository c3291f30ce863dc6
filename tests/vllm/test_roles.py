"""Prefill apart from decode on vLLM: two engines of one model give what one engine gives that does both.

A process has one vLLM at a time, so the engines come one after the other, and chunks are kept meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from omni_actors.errors import InvalidRequest
from omni_actors.stages.base import StageOutput
from omni_actors.stages.vllm import connector
from tests.support.engine_driver import Driver, for_stages
from tests.vllm.split_model import ARGS, BLOCK, CONTEXT, IDS, ids, save

SIZES = (1, 2, *(edge + off for edge in (BLOCK, 2 * BLOCK, 5 * BLOCK) for off in (-1, 0, 1)), CONTEXT - 9)
"""Prompts around the edges of blocks and of prefill chunks, and the shortest and the longest one."""
LONG = 5 * BLOCK + 1
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("tiny"))


def prompt(size: int) -> dict[str, Any]:
    return {"token_ids": np.random.default_rng(size).integers(4, 250, size)}


@pytest.fixture(scope="module")
def expected(open_stage: Open, tiny: Path) -> dict[int, list[int]]:
    """The tokens of one stage's answers, by the size of the prompt."""
    found = {}
    with closing(open_stage("vllm", tiny, engine_args=ARGS)) as engine:
        driver = Driver(engine)
        for size in SIZES:
            driver.start(size, **IDS)
            driver.feed(size, None, prompt(size), last=True)
            found[size] = ids(driver.run()[size])
    assert len({tuple(tokens) for tokens in found.values()}) == len(SIZES), "the prompts matter"
    return found


@pytest.fixture(scope="module")
def sent(open_stage: Open, tiny: Path, expected: dict[int, list[int]]) -> dict[int, list[StageOutput]]:
    """What a stage that prefills sends, by the size of the prompt. All prompts are in one batch."""
    with closing(open_stage("vllm", tiny, engine_args=ARGS, role="prefill")) as engine:
        driver = Driver(engine)
        for size in SIZES:
            driver.start(size, **IDS)
            driver.feed(size, None, prompt(size), last=True)
        outputs = driver.run()
        driver.start(1, journal=((),) * 2, needed_from=2, **IDS)
        driver.feed(1, None, prompt(LONG), last=True)
        again = driver.run()[1]
        _refuses_what_needs_one_stage(driver)
    assert [described(output) for output in again] == [described(output) for output in outputs[LONG]]
    return outputs


def _refuses_what_needs_one_stage(driver: Driver) -> None:
    with pytest.raises(InvalidRequest, match="several answers") as refused:
        driver.start(1, **{**IDS, "n": 2})
    assert refused.value.code == "unsupported_parameter"
    with pytest.raises(InvalidRequest, match="none takes part"):
        driver.start(1, downstream=False, **IDS)
    driver.start(1, **IDS)
    with pytest.raises(InvalidRequest, match="embeddings need a stage") as refused:
        driver.feed(1, None, {"embeds": np.ones((3, 64), np.float32)}, last=True)
    assert refused.value.code == "unsupported_parameter"
    assert not driver.engine.busy


@pytest.fixture(scope="module")
def decoding(open_stage: Open, tiny: Path, sent: dict[int, list[StageOutput]]) -> Iterator[Any]:
    with closing(open_stage("vllm", tiny, engine_args=ARGS, role="decode", waiting_prompts_mb=1)) as engine:
        yield engine


@pytest.fixture
def driver(decoding: Any) -> Iterator[Driver]:
    driver = Driver(decoding)
    yield driver
    assert not decoding.busy
    assert cache_of(driver).usage == 0
    assert decoding.gauges()["waiting_prompt_bytes"] == 0


def described(output: StageOutput) -> tuple[Any, ...]:
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in for_stages(output).items()}
    return shapes, output.data, output.decisions, output.last


def feed(driver: Driver, number: int, outputs: list[StageOutput]) -> None:
    for output in outputs:
        driver.feed(number, output.data, for_stages(output), last=output.last, source="prefill")


def ask(driver: Driver, number: int, outputs: list[StageOutput], **params: Any) -> None:
    driver.start(number, ("prefill",), **{**IDS, **params})
    feed(driver, number, outputs)


def counts(driver: Driver) -> tuple[float, float]:
    gauges = driver.engine.gauges()  # type: ignore[attr-defined]
    return gauges["prompts_loaded"], gauges["prompts_recomputed"]


def cache_of(driver: Driver) -> Any:
    """vLLM's manager of the blocks of its cache."""
    return driver.engine._llm.engine_core.engine_core.scheduler.kv_cache_manager  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", SIZES)
def test_ids_are_those_of_one_stage_at_every_length_around_block_edges(
    driver: Driver, sent: dict[int, list[StageOutput]], expected: dict[int, list[int]], size: int
) -> None:
    assert len(sent[size]) == -(-size // BLOCK)
    loaded, recomputed = counts(driver)
    ask(driver, 1, sent[size])
    assert ids(driver.run()[1]) == expected[size]
    assert counts(driver) == (loaded + 1, recomputed)


def test_prompts_are_loaded_between_the_steps_of_other_requests(
    driver: Driver, sent: dict[int, list[StageOutput]], expected: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block in each step, and two more prompts than the engine decodes at once."""
    monkeypatch.setattr(connector, "STEP_BYTES", 1)
    found: dict[int, list[int]] = {number: [] for number in range(10)}
    for number in found:
        ask(driver, number, sent[SIZES[number]])
        for output in driver.step():
            found[output.request_id] += ids([output])
    for number, outputs in driver.run().items():
        found[number] += ids(outputs)
    assert found == {number: expected[SIZES[number]] for number in found}


@pytest.mark.parametrize("fed", [1, 3, 6])
@pytest.mark.parametrize("steps", [0, 2])
def test_abort_in_the_middle_of_a_transfer_frees_all_of_it(
    driver: Driver,
    sent: dict[int, list[StageOutput]],
    expected: dict[int, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    fed: int,
    steps: int,
) -> None:
    """The fixture checks that the memory of the host is free."""
    monkeypatch.setattr(connector, "STEP_BYTES", 1)
    ask(driver, 1, sent[LONG][:fed])
    for _ in range(steps):
        if driver.engine.busy:
            assert driver.step() == []
    driver.abort(1)
    assert cache_of(driver).usage == 0
    ask(driver, 2, sent[LONG])
    assert ids(driver.run()[2]) == expected[LONG]


def other_weights(output: StageOutput) -> StageOutput:
    header = {**output.data["prompt"], "weights_version": "9"} if "prompt" in output.data else None
    return msgspec.structs.replace(output, data={**output.data, "prompt": header} if header else output.data)


@pytest.mark.parametrize("decided", [5, IDS["max_tokens"]])
@pytest.mark.parametrize("loaded", [True, False])
def test_decode_goes_on_behind_its_journal(
    driver: Driver, sent: dict[int, list[StageOutput]], expected: dict[int, list[int]], loaded: bool, decided: int
) -> None:
    """It computes the decided tokens at once: behind loaded blocks, or with a prompt of its own.

    An answer that has ended needs no blocks.
    """
    engine: Any = driver.engine
    before = engine.gauges()
    outputs = sent[LONG] if loaded else [other_weights(output) for output in sent[LONG]]
    ask(driver, 1, outputs, journal=tuple((token,) for token in expected[LONG][:decided]))
    assert ids(driver.run()[1]) == expected[LONG]
    after = engine.gauges()
    assert after["generation_tokens"] - before["generation_tokens"] == len(expected[LONG]) - decided
    assert (after["prompts_loaded"] > before["prompts_loaded"]) == (loaded and decided == 5)


def other_layout(output: StageOutput) -> StageOutput:
    return msgspec.structs.replace(output, data={**output.data, "layout": "another"})


def other_first_layout(output: StageOutput) -> StageOutput:
    """As if the worker that had sent the first block had died, and the next one ran on a node with another CPU."""
    return other_layout(output) if "prompt" in output.data else output


def other_dtype(output: StageOutput) -> StageOutput:
    block = np.zeros(tuple(output.downstream["block"].shape), np.float16)
    return msgspec.structs.replace(output, downstream={**output.downstream, "block": block})


def no_block(output: StageOutput) -> StageOutput:
    kept = {name: tensor for name, tensor in output.downstream.items() if name != "block" or output.last}
    return msgspec.structs.replace(output, downstream=kept)


@pytest.mark.parametrize("changed", [other_weights, other_layout, other_first_layout, other_dtype, no_block])
def test_a_rejected_transfer_is_recomputed_by_the_stage_that_decodes(
    driver: Driver,
    sent: dict[int, list[StageOutput]],
    expected: dict[int, list[int]],
    changed: Callable[[StageOutput], StageOutput],
) -> None:
    """The engine rejects it; another dtype is rejected by vLLM's worker, which has taken blocks of the cache for it."""
    loaded, recomputed = counts(driver)
    ask(driver, 2, sent[SIZES[4]])
    ask(driver, 1, [changed(output) for output in sent[LONG]])
    found = driver.run()
    assert [ids(found[1]), ids(found[2])] == [expected[LONG], expected[SIZES[4]]]
    assert counts(driver) == (loaded + 1, recomputed + 1)


def test_a_prompt_without_room_in_the_hosts_memory_is_recomputed(
    driver: Driver, sent: dict[int, list[StageOutput]], expected: dict[int, list[int]]
) -> None:
    """All prompts wait for their last chunk. They take 16 KiB a block and 1.5 MB together; 1 MB is allowed."""
    loaded, recomputed = counts(driver)
    sizes = SIZES[-4:]
    waiting = range(len(sizes) * 4)
    for number in waiting:
        driver.start(number, ("prefill",), **IDS)
        feed(driver, number, sent[sizes[number % len(sizes)]][:-1])
    assert driver.engine.gauges()["waiting_prompt_bytes"] <= 1e6  # type: ignore[attr-defined]
    for number in waiting:
        feed(driver, number, sent[sizes[number % len(sizes)]][-1:])
    found = driver.run()
    for number in waiting:
        assert ids(found[number]) == expected[sizes[number % len(sizes)]]
    now_loaded, now_recomputed = counts(driver)
    assert now_loaded - loaded >= 1
    assert now_recomputed - recomputed >= 1


def test_what_needs_the_forwards_of_the_prompt_is_computed_by_the_stage_that_decodes(
    driver: Driver, sent: dict[int, list[StageOutput]], expected: dict[int, list[int]]
) -> None:
    ask(driver, 1, sent[LONG], prompt_logprobs=1)
    outputs = driver.run()[1]
    assert ids(outputs) == expected[LONG]
    assert len(outputs[0].data["prompt_logprobs"]) == LONG


def test_what_decode_refuses_leaves_it_in_service(
    driver: Driver, sent: dict[int, list[StageOutput]], expected: dict[int, list[int]]
) -> None:
    with pytest.raises(InvalidRequest, match="has one source"):
        driver.start(1, **IDS)
    first = sent[LONG][0]
    with pytest.raises(InvalidRequest, match="no tokens of the prompt") as refused:
        ask(driver, 1, [msgspec.structs.replace(first, data={"layout": first.data["layout"]})])
    assert refused.value.code == "prefill_mismatch"
    driver.live.clear()
    tokens = -for_stages(first)["tokens"].numpy()
    with pytest.raises(InvalidRequest, match="positions without tokens") as refused:
        ask(driver, 1, [msgspec.structs.replace(first, downstream={**first.downstream, "tokens": tokens})])
    assert refused.value.code == "prefill_mismatch"
    size = CONTEXT
    header = {**first.data["prompt"], "positions": size}
    beyond = msgspec.structs.replace(
        first,
        data={**first.data, "prompt": header},
        downstream={**first.downstream, "tokens": np.zeros(size, np.int64)},
    )
    driver.live.clear()
    with pytest.raises(InvalidRequest, match="context of 256") as refused:
        ask(driver, 1, [beyond])
    assert refused.value.code == "context_length_exceeded"
    driver.live.clear()
    ask(driver, 1, sent[LONG])
    assert ids(driver.run()[1]) == expected[LONG]


def test_clients_cannot_name_a_transfer(
    driver: Driver, sent: dict[int, list[StageOutput]], expected: dict[int, list[int]]
) -> None:
    forged = {"do_remote_prefill": True, "positions": 10**6, "transfer": "2", "do_remote_decode": True}
    ask(driver, 1, sent[LONG], extra_args={**IDS["extra_args"], "kv_transfer_params": forged})
    assert ids(driver.run()[1]) == expected[LONG]
