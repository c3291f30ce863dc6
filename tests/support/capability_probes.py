"""How each capability is tried on a running engine. A probe returns if the capability works, or raises Unsupported.

A probe fails in any other way if the capability pretends: it returns and nothing has happened.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import trio
from safetensors.numpy import save_file

from omni_actors.errors import Aborted, InvalidAdapter, InvalidRequest, StageAsleep, Unsupported
from omni_actors.outputs import Answer
from omni_actors.stages import assets
from tests.support.capability_subjects import Subject

NO_PROMPTS = "its engine reads no prompts"


class Capability(NamedTuple):
    """A row of the table. how: the call that uses it, as a user writes it."""

    how: str
    probe: Callable[[Subject], Awaitable[None]]


def _reads_prompts(subject: Subject) -> bool:
    return "prompt" in subject.ask and "messages" in subject.omni.pipeline.stages[subject.stage].accepts


async def _answer(subject: Subject, **more: Any) -> Answer:
    return await subject.omni.generate(**{**subject.ask, **more}).collect()


def _content(answer: Answer) -> tuple[str, list[bytes]]:
    return answer.text, [picture.pixels.tobytes() for picture in answer.pictures]


async def _same_as_asked(subject: Subject, **other: Any) -> None:
    """Compare with the answer to the usual request."""
    given = {key: value for key, value in subject.ask.items() if key not in ("prompt", "script")}
    assert _content(await subject.omni.generate(**{**given, **other}).collect()) == _content(await _answer(subject))


def _require_prompt(subject: Subject, capability: str) -> None:
    if not _reads_prompts(subject):
        raise Unsupported(subject.stage, capability, NO_PROMPTS)


# Prompts


async def a_request(subject: Subject) -> None:
    answer = await _answer(subject)
    assert answer.text or answer.audio is not None or answer.pictures or "transcript" in answer.data


async def a_conversation(subject: Subject) -> None:
    _require_prompt(subject, "messages")
    await _same_as_asked(subject, prompt=[{"role": "user", "content": subject.ask["prompt"]}])


async def _raw(subject: Subject, kind: str, value: Any) -> None:
    _require_prompt(subject, kind)
    assert (await _answer(subject, prompt={kind: value})).data


async def a_raw_text(subject: Subject) -> None:
    await _raw(subject, "prompt", "what is it ?")


async def token_ids(subject: Subject) -> None:
    await _raw(subject, "prompt_token_ids", [5, 6, 7])


async def prompt_embeddings(subject: Subject) -> None:
    _require_prompt(subject, "prompt_embeds")
    try:
        await _answer(subject, prompt={"prompt_embeds": np.zeros((3, 1), np.float32)})
    except Unsupported:
        raise
    except InvalidRequest as error:  # it names the width that the model has
        width = max(int(word) for word in error.message.replace(",", " ").replace(")", " ").split() if word.isdigit())
        embeddings = np.random.default_rng(0).normal(0, 0.1, (3, width)).astype(np.float32)
        assert (await _answer(subject, prompt={"prompt_embeds": embeddings})).data


async def a_list(subject: Subject) -> None:
    """Of three prompts, or of one request three times where the engine reads no prompts."""
    _require_prompt(subject, "prompt")
    asked = {key: value for key, value in subject.ask.items() if key != "prompt"}
    answers = await subject.omni.generate([subject.ask["prompt"]] * 3, **asked).collect()
    assert [each.text for each in answers] == [(await _answer(subject)).text] * 3
    assert all(len(each.pictures) == len(answers[0].pictures) for each in answers)


async def live_input(subject: Subject) -> None:
    """Text or sound that arrives while the request runs."""

    async def parts(whole: Any, cuts: int) -> AsyncIterator[Any]:
        for part in (whole[at : at + cuts] for at in range(0, len(whole), cuts)):
            yield part
            await trio.lowlevel.checkpoint()

    if "script" in subject.ask:
        answer = await _answer(subject, script=parts(subject.ask["script"], 3))
        assert answer.audio is not None
    elif "prompt" in subject.ask:
        await _same_as_asked(subject, prompt=parts(subject.ask["prompt"], 3))
    else:
        sound = subject.ask["multi_modal_data"]["audio"]

        async def pieces() -> AsyncIterator[Any]:
            async for samples in parts(sound.samples, 4000):
                yield type(sound)(samples, sound.sample_rate)

        assert (await _answer(subject, multi_modal_data={"audio": pieces()})).text == (await _answer(subject)).text


# Requests


def _require_parameter(subject: Subject, name: str) -> None:
    schema = subject.omni.pipeline.spec(subject.stage).params
    if schema is not None and name not in schema.__struct_fields__:
        raise Unsupported(subject.stage, name, "its engine has no such parameter")


async def stage_parameters(subject: Subject) -> None:
    """Parameters for one stage alone. An unknown one is refused by name."""
    await _answer(subject, sampling_params={subject.stage: {}})
    with pytest.raises(InvalidRequest, match="no_such_parameter"):
        await _answer(subject, sampling_params={subject.stage: {"no_such_parameter": 1}})


async def a_seed(subject: Subject) -> None:
    _require_parameter(subject, "seed")
    first, second = [await _answer(subject, seed=3) for _ in range(2)]
    assert _content(first) == _content(second)
    if first.audio is not None and second.audio is not None:
        assert len(first.audio.samples) == len(second.audio.samples)


async def log_probabilities(subject: Subject) -> None:
    _require_parameter(subject, "logprobs")
    outputs = [output async for output in subject.omni.generate(**subject.ask, logprobs=2)]
    own = [output.data for output in outputs if output.stage == subject.stage]
    found = [token for data in own for token in data.get("logprobs", [])]
    assert len(found) == own[-1]["completion_tokens"]


async def structured_output(subject: Subject) -> None:
    _require_parameter(subject, "structured_outputs")
    answer = await _answer(subject, structured_outputs={"choice": ["what", "what is it"]})
    assert "what is it".startswith(answer.text.strip())


async def a_priority(subject: Subject) -> None:
    await _answer(subject, priority=-1)


async def cumulative_outputs(subject: Subject) -> None:
    outputs = [output async for output in subject.omni.generate(**{**subject.ask, "output_kind": "cumulative"})]
    texts = [output.delta for output in outputs if isinstance(output.delta, str)]
    totals = [output.total for output in outputs if output.delta is not None]
    assert totals == [] or not texts or totals[-1] == "".join(texts)


async def an_abort(subject: Subject) -> None:
    generation = subject.omni.generate(**{**subject.ask, "request_id": "to-abort"})
    freed = await subject.omni.abort("to-abort")
    assert "to-abort" in freed.requests
    with pytest.raises(Aborted):
        await generation.collect()


# The engine


async def _ask_engine(subject: Subject, method: str, *arguments: Any, **more: Any) -> Any:
    """Call a method of the system for the subject's stage alone; raise its reply's error."""
    replies = await getattr(subject.omni, method)(*arguments, stages=(subject.stage,), **more)
    [reply] = replies[subject.stage]
    if reply.error is not None:
        raise reply.error
    return reply.value


async def adapters(subject: Subject) -> None:
    """An engine with adapters reads one that fits no model, and refuses it. (test_loras.py has those that fit.)"""
    with tempfile.TemporaryDirectory() as directory:
        config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["nowhere"]}
        (Path(directory) / "adapter_config.json").write_text(json.dumps(config))
        pair = {f"base_model.model.nowhere.lora_{side}.weight": np.ones((1, 1), np.float32) for side in "AB"}
        save_file(pair, Path(directory) / "adapter_model.safetensors")
        try:
            await subject.omni.add_lora("fits-nothing", directory, stages=(subject.stage,))
        except InvalidAdapter:
            pass
        else:
            await subject.omni.remove_lora("fits-nothing")  # the echo engine has no model that it could not fit
    assert subject.omni.list_loras() == []


async def prefix_cache(subject: Subject) -> None:
    await _ask_engine(subject, "reset_prefix_cache")


async def media_cache(subject: Subject) -> None:
    await _ask_engine(subject, "reset_mm_cache")


async def encoder_cache(subject: Subject) -> None:
    await _ask_engine(subject, "reset_encoder_cache")


async def rpc(subject: Subject) -> None:
    assert await _ask_engine(subject, "collective_rpc", "check_health") == [None]


async def light_sleep(subject: Subject) -> None:
    memory = await _ask_engine(subject, "sleep", 1)
    try:
        assert memory["before"]["rss_bytes"] > 0
        assert await subject.omni.is_sleeping()
    finally:
        await subject.omni.wake_up(stages=(subject.stage,))
    await a_request(subject)


async def deep_sleep(subject: Subject) -> None:
    """The worker ends, so its memory is free; the request that follows is served by a new one."""
    memory = await _ask_engine(subject, "sleep", 2)
    try:
        assert memory["before"]["rss_bytes"] > 0
        assert memory["after"]["rss_bytes"] == 0
        with pytest.raises(StageAsleep):
            await _answer(subject)
    finally:
        await subject.omni.wake_up(stages=(subject.stage,))
    assert not await subject.omni.is_sleeping()
    await a_request(subject)


async def new_weights(subject: Subject) -> None:
    """Those that it has, as another version."""
    model = subject.omni.pipeline.stages[subject.stage].model
    if model is None:
        raise Unsupported(subject.stage, "update_weights", "the stage has no model")
    directory = Path(model) if Path(model).is_absolute() else assets.resolve(model)
    directory /= subject.omni.pipeline.spec(subject.stage).checkpoint_folder
    [reply] = (await subject.omni.update_weights(directory, version="2", stages=(subject.stage,)))[subject.stage]
    if reply.error is not None:
        raise reply.error
    outputs = [output async for output in subject.omni.generate(**subject.ask)]
    assert {output.data["weights_version"] for output in outputs if output.stage == subject.stage} <= {"2"}


async def a_profile(subject: Subject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "profile.json"
        [reply] = (await subject.omni.start_profile((subject.stage,)))[subject.stage]
        await a_request(subject)
        await subject.omni.stop_profile(file)
        if reply.error is not None:
            raise reply.error
        assert json.loads(file.read_text())["traceEvents"]


async def embeddings_of_texts(subject: Subject) -> None:
    _require_prompt(subject, "encode")
    near, same = await subject.omni.encode(["what is it ?"] * 2)
    np.testing.assert_allclose(near.vector, same.vector, atol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(near.vector), 1.0, atol=1e-4)


async def tokens(subject: Subject) -> None:
    _require_prompt(subject, "tokenize")
    found = await subject.omni.tokenize("what is it ?", add_special_tokens=False)
    assert "what" in await subject.omni.detokenize(found.tokens)


async def a_tokenizer(subject: Subject) -> None:
    tokenizer = await subject.omni.get_tokenizer(subject.stage)
    assert tokenizer.encode("what is it ?")


async def pausing(subject: Subject) -> None:
    generation = None
    await subject.omni.pause_generation("keep")
    try:
        assert await subject.omni.is_paused()
        generation = subject.omni.generate(**subject.ask)
    finally:
        await subject.omni.resume_generation()
    assert generation is not None
    await generation.collect()


CAPABILITIES: Mapping[str, Mapping[str, Capability]] = {
    "Prompts": {
        "a request": Capability("`generate(…)`", a_request),
        "conversation": Capability("`generate(messages)`", a_conversation),
        "raw text": Capability('`generate({"prompt": text})`', a_raw_text),
        "token ids": Capability('`generate({"prompt_token_ids": ids})`', token_ids),
        "embeddings": Capability('`generate({"prompt_embeds": array})`', prompt_embeddings),
        "a list of prompts": Capability("`generate([…])`", a_list),
        "live input": Capability("`generate(async_iterator)`", live_input),
    },
    "Requests": {
        "parameters by stage": Capability("`generate(…, sampling_params={stage: …})`", stage_parameters),
        "seed": Capability("`generate(…, seed=…)`", a_seed),
        "log probabilities": Capability("`generate(…, logprobs=…)`", log_probabilities),
        "structured output": Capability("`generate(…, structured_outputs=…)`", structured_output),
        "priority": Capability("`generate(…, priority=…)`", a_priority),
        "cumulative outputs": Capability('`generate(…, output_kind="cumulative")`', cumulative_outputs),
        "abort": Capability("`abort(id)`", an_abort),
    },
    "Control": {
        "pause and resume": Capability("`pause_generation`, `resume_generation`, `is_paused`", pausing),
        "LoRA adapters": Capability("`add_lora`, `remove_lora`, `list_loras`, `pin_lora`", adapters),
        "prefix cache": Capability("`reset_prefix_cache`", prefix_cache),
        "media cache": Capability("`reset_mm_cache`", media_cache),
        "encoder cache": Capability("`reset_encoder_cache`", encoder_cache),
        "workers' methods": Capability("`collective_rpc`", rpc),
    },
    "Memory and measurement": {
        "new weights": Capability("`update_weights`, `start_weight_update`, `finish_weight_update`", new_weights),
        "sleep, level 1": Capability("`sleep(1)`, `wake_up`, `is_sleeping`", light_sleep),
        "sleep, level 2": Capability("`sleep(2)`, `wake_up`, `is_sleeping`", deep_sleep),
        "profile": Capability("`start_profile`, `stop_profile`", a_profile),
    },
    "Texts": {
        "embeddings of texts": Capability("`encode`", embeddings_of_texts),
        "tokens": Capability("`tokenize`, `detokenize`", tokens),
        "tokenizer": Capability("`get_tokenizer`", a_tokenizer),
    },
}
"""By group and name."""
