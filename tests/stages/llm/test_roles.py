"""Prefill apart from decode: two engines of one model give what one engine gives that does both."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from omni_actors.stages.base import REFUSALS, InvalidRequest, TemporarilyRefused
from omni_actors.stages.llm.engine import LLMEngine
from ringbuf import Tensor
from tests.stages.llm.resumed_answers import PARAMS, SAMPLED, decisions
from tests.stages.llm.tiny_engine import CONTEXT, PROMPTS, assert_empty, check, opened, user
from tests.support.adapters import adapter, save_adapter
from tests.support.closeness import assert_same_results
from tests.support.conformance import chunks
from tests.support.engine_cases.case import FeedArgs
from tests.support.engine_driver import Driver, for_stages, run_chain

pytestmark = pytest.mark.usefixtures("clear_choices")

BLOCK = 7
"""Positions of a prefill chunk."""
LENGTHS = sorted({1, 2, *(edge + off for edge in (BLOCK, 2 * BLOCK, 9 * BLOCK) for off in (-1, 0, 1)), CONTEXT - 1})
"""Prompts around the edges of blocks, and the shortest and the longest one."""


class Stages(NamedTuple):
    both: Driver
    prefill: Driver
    decode: Driver


@pytest.fixture(scope="module")
def opened_stages(tiny: Path) -> Iterator[Callable[..., LLMEngine]]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(closing(opened(tiny, **options)))


@pytest.fixture(scope="module")
def engines(opened_stages: Callable[..., LLMEngine]) -> list[LLMEngine]:
    return [opened_stages(**options) for options in ({}, {"role": "prefill"}, {"role": "decode"})]


@pytest.fixture
def stages(engines: list[LLMEngine], drive: Callable[..., Driver]) -> Iterator[Stages]:
    yield Stages(*map(drive, engines))
    for engine in engines:
        assert_empty(engine)


def tokens_of(size: int) -> FeedArgs:
    return {}, {"token_ids": np.random.default_rng(size).integers(4, 250, size)}


def question(text: str) -> FeedArgs:
    return user(text), {}


def alone(driver: Driver, prompt: FeedArgs, **params: Any) -> list[Any]:
    driver.start(1, **params)
    driver.feed(1, *prompt, last=True)
    outputs: list[Any] = driver.run()[1]
    return outputs


def apart(prefill: Driver, decode: Driver, prompt: FeedArgs, journal: Sequence[Any] = (), **params: Any) -> list[Any]:
    def arrive() -> None:
        decode.start(1, ("prefill",), journal=tuple(journal), **params)
        prefill.start(1, **params)
        prefill.feed(1, *prompt, last=True)

    return run_chain({"prefill": prefill, "decode": decode}, [arrive])["decode"][1]


@pytest.mark.parametrize("size", LENGTHS)
def test_ids_are_those_of_one_stage_at_every_length_around_block_edges(stages: Stages, size: int) -> None:
    prompt = tokens_of(size)
    expected = alone(stages.both, prompt, max_tokens=8)
    assert apart(stages.prefill, stages.decode, prompt, max_tokens=8) == expected


@pytest.mark.parametrize("params", [pytest.param(params, id=name) for name, params in PARAMS.items()])
def test_every_way_to_choose_tokens_gives_what_one_stage_gives(stages: Stages, params: dict[str, Any]) -> None:
    expected = alone(stages.both, question(PROMPTS[2]), **params)
    assert apart(stages.prefill, stages.decode, question(PROMPTS[2]), **params) == expected


@pytest.mark.parametrize(
    "params",
    [{"stop": ("e",)}, {"structured_outputs": {"regex": "[a-c]{3,9}"}}, {"repetition_penalty": 2.0}],
    ids=["stop string", "structure", "penalty of the prompt"],
)
def test_what_ends_or_shapes_an_answer_works_apart(stages: Stages, params: dict[str, Any]) -> None:
    expected = alone(stages.both, question(PROMPTS[6]), max_tokens=20, **params)
    assert apart(stages.prefill, stages.decode, question(PROMPTS[6]), max_tokens=20, **params) == expected


def test_a_prompt_of_embeddings(stages: Stages, engines: list[LLMEngine]) -> None:
    hidden = engines[0]._model.get_input_embeddings().embedding_dim
    embeds = np.random.default_rng(1).normal(0, 1, (9, hidden)).astype(np.float32)

    prompt: FeedArgs = {}, {"embeds": embeds}
    expected = alone(stages.both, prompt, max_tokens=6)
    assert apart(stages.prefill, stages.decode, prompt, max_tokens=6) == expected


@pytest.mark.parametrize("order", range(3))
def test_requests_in_any_order_give_what_each_gives_alone(stages: Stages, order: int) -> None:
    """More of them than the engines have rows."""
    expected = {n: alone(stages.both, question(prompt), **{**SAMPLED, "seed": n}) for n, prompt in enumerate(PROMPTS)}

    def arrival(n: int) -> Callable[[], None]:
        def arrive() -> None:
            stages.decode.start(n, ("prefill",), **{**SAMPLED, "seed": n})
            stages.prefill.start(n, **{**SAMPLED, "seed": n})
            stages.prefill.feed(n, *question(PROMPTS[n]), last=True)

        return arrive

    chain = {"prefill": stages.prefill, "decode": stages.decode}
    found = run_chain(chain, [arrival(n) for n in expected], random.Random(order))["decode"]
    for n, outputs in expected.items():
        assert found[n] == [msgspec.structs.replace(output, request_id=n) for output in outputs]


@pytest.mark.parametrize("chunk_layers", [1, 2])
def test_layers_may_travel_in_chunks_of_their_own(
    stages: Stages, opened_stages: Callable[..., LLMEngine], drive: Any, chunk_layers: int
) -> None:
    prefill = drive(opened_stages(role="prefill", chunk_layers=chunk_layers))
    expected = alone(stages.both, tokens_of(2 * BLOCK + 1), max_tokens=8)
    assert apart(prefill, stages.decode, tokens_of(2 * BLOCK + 1), max_tokens=8) == expected
    layers = prefill.engine._shape.layers
    assert len(sent(prefill, tokens_of(2 * BLOCK + 1))) == 3 * -(-layers // chunk_layers)


@pytest.mark.parametrize("block", [1, 3, 16, 50])
def test_the_stages_may_have_prefill_chunks_of_different_sizes(
    stages: Stages, opened_stages: Callable[..., LLMEngine], drive: Any, block: int
) -> None:
    decode = drive(opened_stages(role="decode", prefill_chunk=block))
    expected = alone(stages.both, tokens_of(40), max_tokens=8)
    assert apart(stages.prefill, decode, tokens_of(40), max_tokens=8) == expected


def test_the_prefix_cache_changes_no_chunk(opened_stages: Callable[..., LLMEngine], stages: Stages, drive: Any) -> None:
    cached = drive(opened_stages(role="prefill", prefix_cache_mb=1))
    expected = chunks(sent(stages.prefill, tokens_of(30)))
    for _ in range(2):
        assert_same_results(chunks(sent(cached, tokens_of(30))), expected)
    assert cached.engine.gauges()["prefix_cache_hits"] == 28


@pytest.mark.parametrize("cut", range(0, 21, 4))
def test_decode_goes_on_behind_its_journal(stages: Stages, cut: int) -> None:
    for params in (PARAMS["sampled"], PARAMS["logprobs"]):
        expected = alone(stages.both, question(PROMPTS[2]), **params)
        journal = decisions(expected[:cut])
        assert apart(stages.prefill, stages.decode, question(PROMPTS[2]), journal, **params) == expected


def test_prefill_sends_the_same_chunks_behind_a_journal(stages: Stages) -> None:
    expected = sent(stages.prefill, tokens_of(20))
    stages.prefill.start(1, journal=((),) * 2, needed_from=2)
    stages.prefill.feed(1, *tokens_of(20), last=True)
    assert_same_results(chunks(stages.prefill.run()[1]), chunks(expected))
    assert all(output.decisions == () for output in expected)


@pytest.mark.parametrize("fed", range(4))
def test_abort_in_the_middle_of_a_transfer_changes_no_other_request(stages: Stages, fed: int) -> None:
    expected = alone(stages.both, question(PROMPTS[0]), max_tokens=12)
    outputs = sent(stages.prefill, tokens_of(40))
    stages.decode.start(2, ("prefill",), max_tokens=12)
    for output in outputs[:fed]:
        stages.decode.feed(2, output.data, for_stages(output), source="prefill")
        if stages.decode.engine.busy:
            stages.decode.step()
    if fed:
        check(stages.decode.engine, {2})
    stages.decode.abort(2)
    assert apart(stages.prefill, stages.decode, question(PROMPTS[0]), max_tokens=12) == expected


def test_an_adapter_applies_to_prompt_and_answer(stages: Stages, tiny: Path, tmp_path: Path) -> None:
    lora = adapter(save_adapter(AutoModelForCausalLM.from_pretrained(tiny), tmp_path / "one"))
    plain = alone(stages.both, tokens_of(20), max_tokens=12)
    expected = alone(stages.both, tokens_of(20), max_tokens=12, lora=lora)
    assert expected != plain
    assert apart(stages.prefill, stages.decode, tokens_of(20), max_tokens=12, lora=lora) == expected
    assert apart(stages.prefill, stages.decode, tokens_of(20), max_tokens=12) == plain


def sent(prefill: Driver, prompt: FeedArgs, **params: Any) -> list[Any]:
    """What a stage sends that prefills."""
    prefill.start(1, **params)
    prefill.feed(1, *prompt, last=True)
    outputs: list[Any] = prefill.run()[1]
    return outputs


def refusal(decode: Driver, data: Any, tensors: Any, *, last: bool, number: int = 1) -> Any:
    decode.start(number, ("prefill",))
    with pytest.raises(REFUSALS) as refused:
        decode.feed(number, data, tensors, last=last, source="prefill")
    decode.live.discard(number)
    return refused.value


def give(decode: Driver, number: int, outputs: Sequence[Any]) -> None:
    """Feed what a stage has sent that prefills."""
    for output in outputs:
        decode.feed(number, output.data, for_stages(output), last=output.last, source="prefill")


def replaced(tensors: dict[str, Any], name: str, change: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    wire: Tensor = tensors[name]
    return {**tensors, name: change(torch.from_numpy(np.array(wire.numpy()))).numpy()}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("keys", lambda keys: keys[:, :1]),
        ("keys", lambda keys: keys[:-1]),
        ("keys", lambda keys: keys[0]),
        ("values", lambda values: values[..., :-1]),
        ("values", lambda values: values.double()),
        ("tokens", lambda tokens: tokens[:-1]),
        ("tokens", lambda tokens: tokens + 1000),
        ("logits", lambda logits: logits[:-1]),
        ("logits", lambda logits: logits.long()),
    ],
)
def test_a_chunk_of_another_model_is_refused(stages: Stages, name: str, change: Callable[..., Any]) -> None:
    [output] = sent(stages.prefill, tokens_of(5))
    error = refusal(stages.decode, output.data, replaced(for_stages(output), name, change), last=True)
    assert error.param == "prompt"
    assert error.code == "prefill_mismatch"


def test_what_is_missing_is_refused(stages: Stages) -> None:
    first, *_, last = sent(stages.prefill, tokens_of(20))
    assert refusal(stages.decode, first.data, for_stages(first), last=True).code == "prefill_mismatch"
    assert refusal(stages.decode, last.data, for_stages(last), last=True).code == "prefill_mismatch"
    whole = for_stages(sent(stages.prefill, tokens_of(5))[0])
    del whole["logits"]
    for last in (True, False):
        data = {"prompt": {"positions": 5}}
        assert refusal(stages.decode, data, whole, last=last).code == "prefill_mismatch"
    assert refusal(stages.decode, {"prompt": {"positions": 0}}, {}, last=False).param


def test_a_prompt_of_other_weights_is_refused(stages: Stages) -> None:
    [output] = sent(stages.prefill, tokens_of(5))
    data = {"prompt": {**output.data["prompt"], "weights_version": "second"}}
    error = refusal(stages.decode, data, for_stages(output), last=True)
    assert isinstance(error, TemporarilyRefused)
    assert error.code == "weights_version_mismatch"
    assert "'second'" in str(error)


def test_a_prompt_without_room_is_refused_for_now_and_others_go_on(
    stages: Stages, opened_stages: Callable[..., LLMEngine], drive: Any
) -> None:
    """There is room for a prompt as long as the context, so for two of 40 positions. One with a journal needs none."""
    decode = drive(opened_stages(role="decode", max_batch=1))
    prompt, params = tokens_of(40), {"max_tokens": 6}
    expected = alone(stages.both, prompt, **params)
    first, *others = sent(stages.prefill, prompt)
    for number, journal in ((1, ()), (2, decisions(expected)[:2]), (3, ())):
        decode.start(number, ("prefill",), journal=journal, **params)
        give(decode, number, [first])
    error = refusal(decode, first.data, for_stages(first), last=False, number=4)
    assert isinstance(error, TemporarilyRefused)
    assert (error.code, error.retryable) == ("no_room_for_prompt", True)
    check(decode.engine, {1, 2, 3})
    for number in (1, 2, 3):
        give(decode, number, others)
    answers = decode.run()
    for number in (1, 2, 3):
        assert answers[number] == [msgspec.structs.replace(each, request_id=number) for each in expected]
    assert decode.engine.gauges() == {"waiting_prompt_bytes": 0}
    decode.start(4, ("prefill",), **params)
    give(decode, 4, [first, *others])
    assert decode.run()[4][-1].data == expected[-1].data


def test_a_replayed_prompt_is_never_without_room(
    stages: Stages, opened_stages: Callable[..., LLMEngine], drive: Any
) -> None:
    """Neither one that has put out nothing yet, nor one whose outputs decided no token: a thinker's rows, for example.

    The first one takes room, which later requests lack.
    """
    decode = drive(opened_stages(role="decode", max_batch=1))
    prompt = tokens_of(50)
    first, *others = sent(stages.prefill, prompt)
    decode.start(1, ("prefill",))
    give(decode, 1, [first])
    for number, journal in ((2, ()), (3, ((), ()))):
        decode.start(number, ("prefill",), replayed=True, journal=journal, max_tokens=1)
        give(decode, number, [first])
    waiting = 2 * 50 * decode.engine._shape.position_bytes
    assert decode.engine.gauges() == {"waiting_prompt_bytes": waiting}
    assert refusal(decode, first.data, for_stages(first), last=False, number=4).code == "no_room_for_prompt"
    decode.abort(1)
    for number in (2, 3):
        give(decode, number, others)
    assert decode.run().keys() == {2, 3}


def test_a_prompt_has_room_as_soon_as_others_are_in_the_cache_or_gone(
    opened_stages: Callable[..., LLMEngine], stages: Stages, drive: Any
) -> None:
    decode = drive(opened_stages(role="decode", max_batch=1))
    outputs = sent(stages.prefill, tokens_of(50))
    for number in (1, 2):
        decode.start(number, ("prefill",), max_tokens=8, ignore_eos=True)
        give(decode, number, outputs)  # the first one is copied while the second one waits
        while decode.engine._waiting_bytes() > (number - 1) * 50 * decode.engine._shape.position_bytes:
            decode.step()
    assert refusal(decode, outputs[0].data, for_stages(outputs[0]), last=False, number=3).retryable
    decode.abort(2)
    decode.start(3, ("prefill",), max_tokens=1)
    give(decode, 3, outputs)
    decode.run()


def test_megabytes_bound_the_prompts_that_wait(
    stages: Stages, opened_stages: Callable[..., LLMEngine], drive: Any
) -> None:
    decode = drive(opened_stages(role="decode", max_batch=1, waiting_prompts_mb=1))
    first = sent(stages.prefill, tokens_of(90))[0]
    fit = 1_000_000 // (90 * decode.engine._shape.position_bytes)
    for number in range(fit):
        decode.start(number, ("prefill",))
        give(decode, number, [first])
    assert refusal(decode, first.data, for_stages(first), last=False, number=fit).code == "no_room_for_prompt"
    for number in range(fit):
        decode.abort(number)


def test_a_prompt_beyond_the_context_of_decode_is_refused(
    stages: Stages, opened_stages: Callable[..., LLMEngine], drive: Any
) -> None:
    decode = drive(opened_stages(role="decode", context=20))
    first = sent(stages.prefill, tokens_of(20))[0]
    assert refusal(decode, first.data, for_stages(first), last=False).code == "context_length_exceeded"


def test_what_needs_one_stage_is_refused(stages: Stages) -> None:
    for driver, sources in ((stages.prefill, ("client",)), (stages.decode, ("prefill",))):
        with pytest.raises(InvalidRequest, match="guidance") as refused:
            driver.start(1, sources, guidance_scale=2.0)
        assert refused.value.code == "unsupported_parameter"
    with pytest.raises(InvalidRequest, match="embedding"):
        stages.prefill.start(1, pooling="mean")
    with pytest.raises(InvalidRequest, match="decodes"):
        stages.prefill.start(1, downstream=False)
    with pytest.raises(InvalidRequest, match="one source"):
        stages.decode.start(1)


@pytest.mark.parametrize(
    "options", [{"role": "decode", "prefix_cache_mb": 1}, {"chunk_layers": 1}, {"waiting_prompts_mb": 1}]
)
def test_options_that_do_not_fit_the_role_stop_the_start(tiny: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"prefix_cache_mb|chunk_layers|waiting_prompts_mb"):
        opened(tiny, **options)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_warm_up_leaves_nothing(opened_stages: Callable[..., LLMEngine], role: str) -> None:
    engine = opened_stages(role=role)
    engine.warm_up()
    assert_empty(engine)
