"""The ``vllm`` engine against the ``llm`` engine, and what only vLLM can do."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import pytest
from safetensors import safe_open
from transformers import AutoTokenizer
from vllm import SamplingParams

from omni_actors.errors import InvalidRequest
from omni_actors.serve.api.tools import FunctionDefinition, Tool, call_schema
from omni_actors.stages.vllm import _internals
from omni_actors.stages.vllm.arguments import WrongEngineArgument, sampling_params
from omni_actors.stages.vllm.options import VLLMParams, VLLMSampling

QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "Why is the sky blue?",
    "Write one sentence about the sea.",
    "Is water wet?",
    "Who wrote Hamlet? " * 20,
    "Count to five.",
    "Hi",
]


@pytest.fixture
def driver(drive: Callable[..., Any]) -> Any:
    return drive("vllm")


def ask(driver: Any, number: int, question: str, **params: Any) -> None:
    driver.start(number, **params)
    driver.feed(number, {"messages": [{"role": "user", "content": question}]}, last=True)


def answer(driver: Any, question: str = QUESTIONS[0], **params: Any) -> list[Any]:
    ask(driver, 1, question, **params)
    outputs: list[Any] = driver.run()[1]
    return outputs


def text_of(outputs: list[Any], index: int | None = None) -> str:
    return "".join(o.data.get("text", "") for o in outputs if o.data.get("index") == index)


@pytest.mark.usefixtures("clear_choices")
def test_greedy_answers_equal_those_of_the_llm_engine(driver: Any, drive: Callable[..., Any]) -> None:
    """Text and token count are equal, alone and for eight requests that join at different steps, in chunks of 64."""
    ours = drive("llm")
    for number, question in enumerate(QUESTIONS):
        ask(ours, number, question, max_tokens=24)
    expected = ours.run()
    together: dict[int, list[Any]] = {number: [] for number in range(len(QUESTIONS))}
    for number, question in enumerate(QUESTIONS):
        ask(driver, number, question, max_tokens=24)
        for output in driver.step():
            together[output.request_id].append(output)
    for number, outputs in driver.run().items():
        together[number] += outputs
    for number, question in enumerate(QUESTIONS):
        for outputs in (together[number], answer(driver, question, max_tokens=24)):
            assert text_of(outputs) == text_of(expected[number])
            for fact in ("finish_reason", "prompt_tokens", "completion_tokens"):
                assert outputs[-1].data[fact] == expected[number][-1].data[fact]


@pytest.mark.parametrize(("seed", "n"), [(-1, 1), (-2, 3), (-(2**63), 1), (2**63 - 1, 2)])
def test_every_seed_draws_the_same_tokens_again(driver: Any, seed: int, n: int) -> None:
    """Also the one that vLLM takes for none, -1, which further answers of a smaller seed have. Answers differ."""
    params = {"temperature": 1.0, "max_tokens": 12, "extra_args": {"own_logits": True}, "detokenize": False}
    found = []
    for _ in range(2):
        answers: dict[int, list[int]] = {}
        for output in answer(driver, seed=seed, n=n, **params):
            answers.setdefault(output.data.get("index", 0), []).extend(output.data["token_ids"])
        found.append(answers)
    assert found[0] == found[1]
    assert len({tuple(tokens) for tokens in found[0].values()}) == n
    sampling = sampling_params(VLLMParams(seed=seed, n=n, temperature=1.0))
    for made in (sampling, pickle.loads(pickle.dumps(sampling))):
        assert not {None, -1} & {made.seed if made.seed is None else made.seed + index for index in range(n)}


def test_every_field_of_sampling_params_can_be_given() -> None:
    """The exceptions are the fields about how vLLM returns its outputs."""
    ours = {"output_kind", "skip_clone", "flat_logprobs", "output_text_buffer_length"}
    theirs = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    known = set(VLLMParams.__struct_fields__)
    assert theirs - known == ours
    assert known - theirs == {"priority", "lora", "tools", "chat_template_kwargs", "tokenization_kwargs"}
    assert set(VLLMSampling.__struct_fields__) < known


def test_several_answers_have_their_index(driver: Any) -> None:
    outputs = answer(driver, n=3, temperature=1.0, seed=5, max_tokens=8)
    assert {o.data["index"] for o in outputs} == {0, 1, 2}
    assert len({text_of(outputs, index) for index in range(3)}) > 1
    assert [o.data["finish_reason"] for o in outputs if "finish_reason" in o.data] == ["length"] * 3
    assert [o.last for o in outputs].count(True) == 1
    assert outputs[-1].last
    again = answer(driver, n=3, temperature=1.0, seed=5, max_tokens=8)
    assert [text_of(outputs, index) for index in range(3)] == [text_of(again, index) for index in range(3)]


def test_a_seed_decides_what_is_drawn_in_any_batch(driver: Any) -> None:
    """So does a prompt of several prefill chunks, after each of which vLLM draws a token and discards it."""
    params = {"temperature": 1.0, "seed": 11, "max_tokens": 8, "extra_args": {"own_logits": True}}
    long = QUESTIONS[5]
    alone = text_of(answer(driver, long, **params))
    assert alone != text_of(answer(driver, long, **{**params, "seed": 12}))
    ask(driver, 2, long, temperature=1.0, seed=3, max_tokens=12)
    assert text_of(answer(driver, long, **params)) == alone


def test_each_token_has_its_logprobs(driver: Any) -> None:
    outputs = answer(driver, logprobs=2, prompt_logprobs=1, max_tokens=4)
    first = outputs[0].data
    assert len(first["prompt_logprobs"]) == outputs[-1].data["prompt_tokens"]
    assert first["prompt_logprobs"][0] is None
    for output in outputs:
        ([best, *rest],) = output.data["logprobs"]
        assert best["rank"] == 1
        assert best["token"] == output.data["text"]
        assert all(best["logprob"] >= other["logprob"] for other in rest)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"stop": ("France",)}, "The capital of "),
        ({"stop": ("France",), "include_stop_str_in_output": True}, "The capital of France"),
        ({"structured_outputs": {"choice": ["Rome", "Oslo"]}}, ("Rome", "Oslo")),
        ({"structured_outputs": {"regex": r"[0-9]{3}"}}, tuple(f"{n:03}" for n in range(1000))),
        ({"bad_words": ["The"]}, None),
        ({"logit_bias": {"504": -100}}, None),
        ({"frequency_penalty": 2.0, "presence_penalty": 2.0, "min_p": 0.1, "temperature": 0.5, "seed": 3}, None),
    ],
)
def test_sampling_parameters_take_effect(driver: Any, params: dict[str, Any], expected: Any) -> None:
    text = text_of(answer(driver, max_tokens=12, **params))
    plain = text_of(answer(driver, max_tokens=12))
    if expected is None:
        assert text != plain
    else:
        assert text in ((expected,) if isinstance(expected, str) else expected)


def test_an_answer_has_the_requested_structure(driver: Any) -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    params: dict[str, Any] = {"structured_outputs": {"json": {**city, "additionalProperties": False}}}
    assert json.loads(text_of(answer(driver, max_tokens=30, **params)))["city"] in ("Paris", "Rome")


def test_a_custom_logits_processor_acts_on_its_own_request_only(driver: Any) -> None:
    """The request beside it is unaffected."""
    params = {"detokenize": False, "max_tokens": 6, "ignore_eos": True}
    ask(driver, 2, QUESTIONS[0], **params)
    ask(driver, 1, QUESTIONS[0], extra_args={"only": [504, 3575]}, **params)
    found = {
        number: {token for output in outputs for token in output.data["token_ids"]}
        for number, outputs in driver.run().items()
    }
    assert found[1] <= {504, 3575}
    assert len(found[2]) == 6


@pytest.mark.parametrize("sign", [-1, 0])
def test_requests_of_a_lower_priority_value_come_first(driver: Any, sign: int) -> None:
    """Without priorities, requests come in order of arrival. One or two of these prompts fit into a step."""
    for number in range(6):
        ask(driver, number, QUESTIONS[0], max_tokens=1, priority=sign * number)
    steps = []
    while driver.engine.busy:
        steps.append([output.request_id for output in driver.step()])
    steps = [ended for ended in steps if ended]
    assert len(steps) >= 3
    order = [number for ended in steps for number in sorted(ended, reverse=sign < 0)]
    assert order == sorted(order, reverse=sign < 0)


def test_variables_of_the_chat_template(driver: Any, smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    tokenizer.chat_template += "{% if enable_thinking is false %}<think></think>{% endif %}"
    monkeypatch.setattr(driver.engine._vocabulary, "tokenizer", tokenizer)
    kwargs = {"enable_thinking": False}
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    expected = [
        len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **each))
        for each in ({}, kwargs)
    ]
    assert expected[0] < expected[1]
    for given, count in (({}, expected[0]), (kwargs, expected[1])):
        assert answer(driver, max_tokens=2, chat_template_kwargs=given)[-1].data["prompt_tokens"] == count
    tokenized = [
        driver.engine.call("tokenize", {"messages": messages, "chat_template_kwargs": each}) for each in ({}, {"x": 1})
    ]
    assert tokenized[0] == tokenized[1]
    with pytest.raises(InvalidRequest) as caught:
        driver.start(1, chat_template_kwargs={"tools": []})
    assert caught.value.param == "chat_template_kwargs"


def test_text_and_token_ids_take_the_place_of_a_conversation(driver: Any) -> None:
    expected = text_of(answer(driver, max_tokens=8))
    tokenizer = driver.engine._vocabulary.tokenizer
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    for data, tensors in (({"prompt": text}, {}), ({}, {"token_ids": np.array(tokenizer.encode(text))})):
        driver.start(1, max_tokens=8)
        driver.feed(1, data, tensors, last=True)
        assert text_of(driver.run()[1]) == expected
    driver.start(1)
    with pytest.raises(InvalidRequest, match="no token 10000000"):
        driver.feed(1, {}, {"token_ids": np.array([10**7])}, last=True)
    driver.live.discard(1)
    assert not driver.engine.busy


def embeds_of(engine: Any, smollm2: Path, question: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the model's embeddings of this prompt's tokens, float32 (n, hidden)."""
    messages = [{"role": "user", "content": question}]
    ids = engine._vocabulary.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with safe_open(smollm2 / "model.safetensors", "pt") as weights:
        rows: np.ndarray[Any, Any] = weights.get_tensor("model.embed_tokens.weight")[ids].float().numpy()
    return rows


def test_embeds_take_the_place_of_a_conversation(driver: Any, smollm2: Path) -> None:
    """They come in two chunks, beside a conversation. The second prompt is longer than a prefill chunk."""
    for question in (QUESTIONS[0], QUESTIONS[5]):
        expected = answer(driver, question, max_tokens=8)
        embeds = embeds_of(driver.engine, smollm2, question)
        driver.start(1, max_tokens=8)
        driver.feed(1, tensors={"embeds": embeds[:5]})
        ask(driver, 2, QUESTIONS[1], max_tokens=8)
        driver.feed(1, tensors={"embeds": embeds[5:]}, last=True)
        outputs = driver.run()[1]
        assert text_of(outputs) == text_of(expected)
        assert outputs[-1].data["prompt_tokens"] == expected[-1].data["prompt_tokens"]


@pytest.mark.parametrize(
    ("embeds", "messages", "words"),
    [
        (np.zeros((4, 5), np.float32), [], "rows of 5 numbers; the model takes 576"),
        (np.zeros((4, 576), np.int32), [], r"floating point \(n, hidden\) was expected, not int32 \(4, 576\)"),
        (np.zeros(576, np.float32), [], "was expected"),
        (np.zeros((0, 576), np.float32), [], "was expected"),
        (np.zeros((4, 576), np.float32), [{"role": "user", "content": "and this"}], "no messages come with them"),
    ],
)
def test_wrong_embeds_are_refused(driver: Any, embeds: Any, messages: list[Any], words: str) -> None:
    driver.start(1)
    with pytest.raises(InvalidRequest, match=words) as refused:
        driver.feed(1, {"messages": messages}, {"embeds": embeds}, last=True)
    assert refused.value.param == "embeds"
    driver.live.discard(1)
    assert not driver.engine.busy


def test_a_repetition_penalty_is_refused_with_embeds(driver: Any) -> None:
    driver.start(1, repetition_penalty=1.2)
    with pytest.raises(InvalidRequest, match="embeds have none") as refused:
        driver.feed(1, tensors={"embeds": np.zeros((4, 576), np.float32)}, last=True)
    assert refused.value.param == "repetition_penalty"
    driver.live.discard(1)


def test_embeds_are_refused_by_a_stage_without_the_engine_argument(driver: Any) -> None:
    driver.start(1)
    with (
        mock.patch.object(driver.engine._llm.model_config, "enable_prompt_embeds", False),
        pytest.raises(InvalidRequest, match="enable_prompt_embeds: true"),
    ):
        driver.feed(1, tensors={"embeds": np.zeros((4, 576), np.float32)}, last=True)
    driver.live.discard(1)


def test_gauges_are_vllms_metrics(driver: Any) -> None:
    before = driver.engine.gauges()
    ask(driver, 1, QUESTIONS[0], max_tokens=9)
    ask(driver, 2, QUESTIONS[5], max_tokens=9)
    driver.step()
    during = driver.engine.gauges()
    assert (during["num_requests_running"], during["num_requests_waiting"]) == (2, 0)
    assert during["kv_cache_usage_perc"] > 0
    ended = [outputs[-1].data for outputs in driver.run().values()]
    after = driver.engine.gauges()
    assert (after["num_requests_running"], after["kv_cache_usage_perc"]) == (0, 0)
    for name, fact in (("prompt_tokens", "prompt_tokens"), ("generation_tokens", "completion_tokens")):
        assert after[name] - before[name] == sum(data[fact] for data in ended)
    assert {"num_preemptions", "prefix_cache_queries", "prefix_cache_hits"} <= after.keys()
    for name in ("time_to_first_token_seconds", "request_queue_time_seconds"):
        assert after[f"{name}_count"] - before[f"{name}_count"] == 2
        assert after[f"{name}_sum"] > before[f"{name}_sum"]
    tokens = sum(data["completion_tokens"] for data in ended)
    assert after["inter_token_latency_seconds_count"] - before["inter_token_latency_seconds_count"] == tokens - 2
    with mock.patch.object(driver.engine._llm, "log_stats", False):
        assert driver.engine.gauges() == {}


def test_token_ids_take_the_place_of_text(driver: Any) -> None:
    outputs = answer(driver, detokenize=False, max_tokens=4, min_tokens=4, allowed_token_ids=[504, 3575])
    ids = [token for output in outputs for token in output.data["token_ids"]]
    assert len(ids) == 4
    assert set(ids) <= {504, 3575}
    assert not any("text" in output.data for output in outputs)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": 3}, "temperature"),
        ({"logprobs": 10_000}, "logprobs"),
        ({"structured_outputs": {"regx": "a"}}, None),
        ({"structured_outputs": {"regex": "("}}, None),
        ({"min_tokens": 9, "max_tokens": 4}, None),
        ({"n": 0}, "n"),
    ],
)
def test_a_wrong_value_fails_its_own_request(driver: Any, params: dict[str, Any], field: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        answer(driver, **params)
    assert str(refused.value)
    if field:
        assert refused.value.param == field
    driver.live.discard(1)
    assert text_of(answer(driver, max_tokens=7)) == "The capital of France is Paris."


def test_a_prompt_beyond_the_context_is_refused_with_vllms_words(driver: Any) -> None:
    with pytest.raises(InvalidRequest, match="longer than the maximum model length of 1024") as refused:
        answer(driver, "word " * 1100)
    assert (refused.value.param, refused.value.code) == ("messages", "context_length_exceeded")
    driver.live.discard(1)
    assert not driver.engine.busy


@pytest.mark.parametrize(
    ("engine", "given", "words"),
    [
        ("vllm", {"max_model_length": 512}, "a field of vLLM's EngineArgs; did you mean 'max_model_len'?"),
        ("vllm", {"model": "/elsewhere"}, "which the stage's `model` sets"),
        ("vllm", {"worker_cls": "mine.Worker"}, "which the engine itself sets"),
        ("vllm_qwen3_thinker", {"speculative_config": {"method": "ngram"}}, "only None as"),
        ("vllm_qwen2_5_thinker", {"speculative_config": {"method": "ngram"}}, "only None as"),
    ],
)
def test_a_wrong_engine_argument_is_refused_by_name(
    open_stage: Callable[..., Any], engine: str, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(WrongEngineArgument) as refused:
        open_stage(engine, engine_args=given)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kv_cache_memory_bytes": 1 << 20}, "No available memory for the cache blocks"),
        ({"max_model_len": 1 << 20}, "max_model_len"),
        ({"dtype": "float33"}, "dtype"),
    ],
)
def test_a_failed_load_has_vllms_message(open_stage: Callable[..., Any], given: dict[str, Any], words: str) -> None:
    with pytest.raises(Exception, match=words):
        open_stage("vllm", engine_args=given)


def test_an_unknown_architecture_is_named(open_stage: Callable[..., Any], smollm2: Path, tmp_path: Path) -> None:
    for file in smollm2.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    config = (smollm2 / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace("LlamaForCausalLM", "UnknownForCausalLM"))
    with pytest.raises(Exception, match="UnknownForCausalLM"):
        open_stage("vllm", tmp_path)


def test_missing_names_of_vllm_are_listed_with_the_known_versions() -> None:
    away = (
        "vllm.v1.nowhere:Thing",
        "vllm.v1.engine.llm_engine:LLMEngine.walk",
        "vllm.v1.engine.llm_engine:LLMEngine.step(length)",
    )
    _internals.check()
    with (
        mock.patch.object(_internals, "NAMES", (*_internals.NAMES, *away)),
        pytest.raises(_internals.UnsupportedVLLMVersion) as error,
    ):
        _internals.check()
    assert error.value.names == away
    assert "known to work: vLLM 0.32.0" in str(error.value)


def test_the_tokens_of_a_conversation_are_those_of_a_request(driver: Any) -> None:
    engine, messages = driver.engine, [{"role": "user", "content": QUESTIONS[0]}]
    found = engine.call("tokenize", {"messages": messages})
    assert len(found["tokens"]) == answer(driver, QUESTIONS[0], max_tokens=2)[-1].data["prompt_tokens"]
    assert QUESTIONS[0] in engine.call("detokenize", {"tokens": found["tokens"]})


@pytest.mark.usefixtures("clear_choices")
def test_tools_are_in_the_prompt_as_on_the_llm_engine(driver: Any, drive: Callable[..., Any]) -> None:
    """The template of SmolLM2 does not know tools."""
    city = {"enum": ["Rome", "Oslo"]}
    parameters = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"]}
    weather = Tool(FunctionDefinition("weather", parameters={**parameters, "$defs": {"City": city}}))
    clock = Tool(FunctionDefinition("clock"))
    tools = msgspec.to_builtins([weather, clock])
    asked = {"tools": tools, "max_tokens": 12}
    question = "Is it warm in Rome?"
    without = answer(driver, question, max_tokens=12)[-1].data["prompt_tokens"]
    expected, found = answer(drive("llm"), question, **asked), answer(driver, question, **asked)
    assert (text_of(found), found[-1].data["prompt_tokens"]) == (text_of(expected), expected[-1].data["prompt_tokens"])
    assert found[-1].data["prompt_tokens"] > without + 50
    for choice in ([weather], [clock, weather]):
        called = json.loads(
            text_of(answer(driver, question, tools=tools, structured_outputs={"json": call_schema(choice)}))
        )
        assert called["name"] == "clock" or called["arguments"]["city"] in ("Rome", "Oslo")
