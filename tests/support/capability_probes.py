"""How each capability is tried on a running engine. A probe returns if the capability works; the system raises
Unsupported if it does not. A probe itself never raises it.

A probe fails in any other way if the capability pretends: it returns and nothing has happened. Where the question makes
no sense for an engine (``Capability.concerns``), it is not asked.
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
from omni_actors.outputs import Answer, AudioChunk, Picture
from omni_actors.stages import assets
from tests.support.adapters import write_adapter
from tests.support.capability_subjects import LAYERS, Subject

LONG = "what is it ? " * 60
"""Several blocks of a prefix cache."""
POLL_S = 0.01
BETWEEN_PINGS_S = 30.0


def _always(_: Subject) -> bool:
    return True


def _reads_prompts(subject: Subject) -> bool:
    return "prompt" in subject.ask and "messages" in subject.omni.pipeline.stages[subject.stage].accepts


def _is_fed_by_client(subject: Subject) -> bool:
    """Whether the client sends the stage what ``live_input`` sends in parts."""
    kinds = {"script": "script", "prompt": "messages"}
    kind = next((kind for argument, kind in kinds.items() if argument in subject.ask), "audio")
    return kind in subject.omni.pipeline.stages[subject.stage].accepts


def _emits_text(subject: Subject) -> bool:
    return subject.omni.pipeline.stages[subject.stage].emits in ("text", "transcript")


class Capability(NamedTuple):
    """A column of the table.

    how: the call that uses it, as a user writes it. concerns: whether the question makes sense for an engine.
    """

    how: str
    probe: Callable[[Subject], Awaitable[None]]
    concerns: Callable[[Subject], bool] = _always


async def _answer(subject: Subject, **more: Any) -> Answer:
    return await subject.omni.generate(**{**subject.ask, **more}).collect()


def _content(answer: Answer) -> tuple[str, list[bytes]]:
    return answer.text, [picture.pixels.tobytes() for picture in answer.pictures]


async def _same_as_asked(subject: Subject, **other: Any) -> None:
    """Compare with the answer to the usual request."""
    given = {key: value for key, value in subject.ask.items() if key not in ("prompt", "script")}
    assert _content(await subject.omni.generate(**{**given, **other}).collect()) == _content(await _answer(subject))


# Prompts


async def a_request(subject: Subject) -> None:
    answer = await _answer(subject)
    assert answer.text or answer.audio is not None or answer.pictures or "transcript" in answer.data


async def a_conversation(subject: Subject) -> None:
    await _same_as_asked(subject, prompt=[{"role": "user", "content": subject.ask["prompt"]}])


async def _raw(subject: Subject, kind: str, value: Any) -> None:
    assert (await _answer(subject, prompt={kind: value})).data


async def a_raw_text(subject: Subject) -> None:
    await _raw(subject, "prompt", "what is it ?")


async def token_ids(subject: Subject) -> None:
    await _raw(subject, "prompt_token_ids", [5, 6, 7])


async def prompt_embeddings(subject: Subject) -> None:
    try:
        await _answer(subject, prompt={"prompt_embeds": np.zeros((3, 1), np.float32)})
    except Unsupported:
        raise
    except InvalidRequest as error:  # it names the width that the model has
        width = max(int(word) for word in error.message.replace(",", " ").replace(")", " ").split() if word.isdigit())
        embeddings = np.random.default_rng(0).normal(0, 0.1, (3, width)).astype(np.float32)
        assert (await _answer(subject, prompt={"prompt_embeds": embeddings})).data


async def a_list(subject: Subject) -> None:
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


async def stage_parameters(subject: Subject) -> None:
    """Parameters for one stage alone. An unknown one is refused by name."""
    await _answer(subject, sampling_params={subject.stage: {}})
    with pytest.raises(InvalidRequest, match="no_such_parameter"):
        await _answer(subject, sampling_params={subject.stage: {"no_such_parameter": 1}})


async def a_seed(subject: Subject) -> None:
    given = {**subject.ask, "sampling_params": {subject.stage: {"seed": 3}}}
    first, second = [await subject.omni.generate(**given).collect() for _ in range(2)]
    assert _content(first) == _content(second)
    if first.audio is not None and second.audio is not None:
        assert len(first.audio.samples) == len(second.audio.samples)


async def log_probabilities(subject: Subject) -> None:
    given = {subject.stage: {"logprobs": 2}}
    outputs = [output async for output in subject.omni.generate(**subject.ask, sampling_params=given)]
    own = [output.data for output in outputs if output.stage == subject.stage]
    found = [token for data in own for token in data.get("logprobs", [])]
    assert len(found) == own[-1]["completion_tokens"]


async def structured_output(subject: Subject) -> None:
    given = {subject.stage: {"structured_outputs": {"choice": ["what", "what is it"]}}}
    answer = await _answer(subject, sampling_params=given)
    assert "what is it".startswith(answer.text.strip())


async def a_priority(subject: Subject) -> None:
    """Of requests that wait, the one with the lowest number is dispatched first, whichever came first."""
    await subject.omni.pause_generation("wait")
    try:
        late, early = [subject.omni.generate(**{**subject.ask, "priority": number}) for number in (5, -5)]
    finally:
        await subject.omni.resume_generation()
    for generation in (late, early):
        await generation.collect()
    assert (late.stream.request.number or 0) > (early.stream.request.number or 0) > 0


async def cumulative_outputs(subject: Subject) -> None:
    """The last total of each stage is all of its text, all of its sound, or its newest picture."""
    outputs = [output async for output in subject.omni.generate(**{**subject.ask, "output_kind": "cumulative"})]
    for stage in {output.stage for output in outputs}:
        with_content = [output for output in outputs if output.stage == stage and output.delta is not None]
        deltas, totals = [output.delta for output in with_content], [output.total for output in with_content]
        if not with_content:
            continue  # it only tells how far it is, or ends
        sound = [delta.samples for delta in deltas if isinstance(delta, AudioChunk)]
        if sound:
            assert isinstance(totals[-1], AudioChunk)
            np.testing.assert_array_equal(totals[-1].samples, np.concatenate(sound))
        elif isinstance(deltas[-1], Picture):
            assert totals == deltas
        else:
            assert totals[-1] == "".join(map(str, deltas))
    assert any(output.total is not None for output in outputs) or "transcript" in subject.ask["modalities"]


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
    """An adapter that fits no model is refused, and one that fits changes the answer of a request that names it.

    tests/test_loras.py has those of talkers, tests/stages/qwen_image those of the denoiser.
    """
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
        if subject.adapted is not None:
            written = write_adapter(
                Path(directory) / "fits", _checkpoint(subject), LAYERS, part=subject.adapted, rank=4
            )
            await subject.omni.add_lora("fits", written, stages=(subject.stage,))
            plain, again = await _answer(subject), await _answer(subject)
            adapted = await _answer(subject, lora="fits")
            await subject.omni.remove_lora("fits")
            assert plain.text == again.text != adapted.text
    assert subject.omni.list_loras() == []


def _checkpoint(subject: Subject) -> Path:
    """Return the directory of the model of the subject's stage. Its stage has one."""
    model = subject.omni.pipeline.stages[subject.stage].model
    assert model is not None
    directory = Path(model) if Path(model).is_absolute() else assets.resolve(model)
    return directory / subject.omni.pipeline.spec(subject.stage).checkpoint_folder


async def prefix_cache(subject: Subject) -> None:
    """A prompt that was asked before is found in the cache; after the reset it is not."""
    await _ask_engine(subject, "reset_prefix_cache")
    hits = []
    for resets in (False, False, True):
        if resets:
            assert await _ask_engine(subject, "reset_prefix_cache") is not False
        queries, before = _prefix_figures(subject)
        await subject.omni.generate(**{**subject.ask, "prompt": {"prompt": LONG}}).collect()
        with trio.fail_after(BETWEEN_PINGS_S):
            while _prefix_figures(subject)[0] == queries:  # noqa: ASYNC110 - an answered ping has no event
                await trio.sleep(POLL_S)
        hits.append(_prefix_figures(subject)[1] - before)
    assert hits[0] == hits[2] == 0 < hits[1]


def _prefix_figures(subject: Subject) -> tuple[float, float]:
    """Return how many positions were looked up in the stage's prefix cache, and how many found, as of the last ping."""
    labels = {"stage": subject.stage, "replica": "0"}
    read = subject.omni.metrics.registry.get_sample_value
    queries, hits = (read(f"omni_prefix_cache_{name}", labels) for name in ("queries", "hits"))
    return queries or 0.0, hits or 0.0


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
    """Those that it has, as another version; or some tensor, for an engine without a checkpoint."""
    omni, stages = subject.omni, (subject.stage,)
    assert (await omni.get_weight_version())[subject.stage] == "0"
    has_checkpoint = omni.pipeline.stages[subject.stage].model is not None
    weights = _checkpoint(subject) if has_checkpoint else {"weights": np.ones(2, np.float32)}
    [reply] = (await omni.update_weights(weights, version="2", stages=stages))[subject.stage]
    if reply.error is not None:
        raise reply.error
    assert await omni.get_weight_version(stages=stages) == {subject.stage: "2"}
    outputs = [output async for output in omni.generate(**subject.ask)]
    own = {output.data["weights_version"] for output in outputs if output.stage == subject.stage}
    assert own == ({"2"} if omni.pipeline.stages[subject.stage].emits in subject.modalities else set())


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
    near, same = await subject.omni.encode(["what is it ?"] * 2)
    np.testing.assert_allclose(near.vector, same.vector, atol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(near.vector), 1.0, atol=1e-4)


async def tokens(subject: Subject) -> None:
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
        "conversation": Capability("`generate(messages)`", a_conversation, _reads_prompts),
        "raw text": Capability('`generate({"prompt": text})`', a_raw_text, _reads_prompts),
        "token ids": Capability('`generate({"prompt_token_ids": ids})`', token_ids, _reads_prompts),
        "embeddings": Capability('`generate({"prompt_embeds": array})`', prompt_embeddings, _reads_prompts),
        "a list of prompts": Capability("`generate([…])`", a_list, _reads_prompts),
        "live input": Capability("`generate(async_iterator)`", live_input, _is_fed_by_client),
    },
    "Requests": {
        "parameters by stage": Capability("`generate(…, sampling_params={stage: …})`", stage_parameters),
        "seed": Capability("`generate(…, seed=…)`", a_seed),
        "log probabilities": Capability("`generate(…, logprobs=…)`", log_probabilities, _emits_text),
        "structured output": Capability("`generate(…, structured_outputs=…)`", structured_output, _emits_text),
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
        "embeddings of texts": Capability("`encode`", embeddings_of_texts, _reads_prompts),
        "tokens": Capability("`tokenize`, `detokenize`", tokens, _reads_prompts),
        "tokenizer": Capability("`get_tokenizer`", a_tokenizer),
    },
}
"""By group and name."""
