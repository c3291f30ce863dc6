"""The arguments of ``generate`` and ``submit`` that are for the system, and lists of prompts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import trio

from omni_actors import OmniSystem, prompts
from omni_actors.config import Limits, Pipeline, Stage
from omni_actors.errors import Aborted, ConfigError, InvalidRequest, Overloaded, Unsupported
from omni_actors.generation import Generation
from omni_actors.generations import Generations
from omni_actors.orchestrator.pieces import Input
from omni_actors.outputs import AudioChunk, Total
from omni_actors.sync import Omni
from omni_actors.system.parameters import Parameters
from tests.support.shared_system import SharedSystem, open_shared_system, with_shared_system

WATCHDOG_S = 60.0
LIMIT = 6
STAGES = {
    "text": Stage(engine="echo", accepts=("messages",), emits="text"),
    "voice": Stage(engine="tests.support.served_engines:Speaker", accepts=("script",), emits="audio"),
}
SPEAKING = Pipeline(name="speaking", limits=Limits(max_requests=LIMIT), stages=STAGES)
REFUSED = {"role": "user", "content": "no"}


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int]) -> Iterator[SharedSystem]:
    with open_shared_system(lambda: OmniSystem.open(SPEAKING), fixture_processes) as shared_system:
        yield shared_system


# lists of prompts


@with_shared_system
async def test_each_prompt_of_a_list_has_its_own_outputs(omni: OmniSystem) -> None:
    asked = ["a", [{"role": "user", "content": "b"}], {"prompt": "c"}, {"messages": [{"role": "user", "content": "d"}]}]
    generations = omni.generate(asked, request_id="mine")
    assert generations.request_ids == ("mine-0", "mine-1", "mine-2", "mine-3")
    found: dict[int, str] = {}
    with trio.fail_after(WATCHDOG_S):
        async for output in generations:
            assert output.request_id == f"mine-{output.index}"
            found[output.index] = output.delta
    assert found == {0: "a", 1: "b", 2: "c", 3: "d"}
    answers = await omni.generate(asked).collect()
    assert [(answer.index, answer.text) for answer in answers] == list(enumerate("abcd"))
    assert [await member.text() for member in omni.generate(asked[:2]).members] == ["a", "b"]
    assert await Generations([]).collect() == []


@with_shared_system
async def test_one_failure_leaves_the_other_answers_alone(omni: OmniSystem) -> None:
    asked = ["a", {"messages": [{"role": "user", "content": [1]}]}, "c"]
    generations, found, errors = omni.generate(asked), [], []
    with trio.fail_after(WATCHDOG_S):
        while True:
            try:
                found.append((await anext(generations)).index)
            except InvalidRequest as error:
                errors.append(error.index)
            except StopAsyncIteration:
                break
    assert (sorted(found), errors) == ([0, 2], [1])
    answers = await omni.generate(asked).collect(keep_errors=True)
    assert [answer.text for answer in answers] == ["a", "", "c"]
    assert isinstance(answers[1].error, InvalidRequest)
    with pytest.raises(InvalidRequest) as failed:
        await omni.generate(asked).collect()
    assert (answers[1].error.index, failed.value.index) == (1, 1)
    with pytest.raises(InvalidRequest, match="prompt") as failed:
        omni.generate(["a", {"prompt": 5}])
    assert failed.value.index == 1
    no_route = {"messages": asked[1]["messages"], "multi_modal_data": {"image": np.zeros((2, 2, 3), np.uint8)}}
    with pytest.raises(InvalidRequest, match="image") as failed:
        omni.generate(["a", no_route])
    assert failed.value.index == 1


@with_shared_system
async def test_reading_a_list_takes_what_comes_first_and_may_be_cancelled(omni: OmniSystem) -> None:
    """Both requests wait for their input; the second one gets its own first."""
    senders, members = [], []
    for _ in range(2):
        send, receive = trio.open_memory_channel[Input](0)
        senders.append(send)
        members.append(omni.submit({"messages": receive}))
    generations = Generations(members)
    with trio.move_on_after(0.01) as waited:
        await anext(generations)
    assert waited.cancelled_caught
    with trio.fail_after(WATCHDOG_S):
        for index in (1, 0):
            await senders[index].send(Input({"text": str(index)}))
            await senders[index].aclose()
            while (output := await anext(generations)).delta is None:
                assert output.finished
            assert (output.index, output.delta) == (index, str(index))
        assert not [output async for output in generations if output.delta]


@with_shared_system
async def test_a_list_is_submitted_as_a_whole_or_not_at_all(omni: OmniSystem) -> None:
    with pytest.raises(Overloaded):
        omni.generate(["a"] * (LIMIT + 1))
    with pytest.raises(InvalidRequest, match="prompt"):
        omni.generate(["a", {"prompt": 3}])
    with pytest.raises(InvalidRequest, match="brings its own"):
        omni.generate(["a"], script="b")
    with trio.fail_after(WATCHDOG_S):
        while omni.in_flight:
            await trio.lowlevel.checkpoint()
    generations = omni.generate(["a", "b"], on_failure="fail")
    generations.abort()
    with pytest.raises(Aborted):
        await generations.collect()


def test_the_blocking_face_reads_lists_too(fixture_processes: set[int]) -> None:
    with Omni.open(SPEAKING) as omni:
        assert sorted((output.index, output.delta) for output in omni.generate(["a", "b"])) == [(0, "a"), (1, "b")]
        assert [answer.text for answer in omni.generate(["a", "b"]).collect(keep_errors=True)] == ["a", "b"]
        assert len(omni.generate(["a", "b"]).request_ids) == 2
        omni.generate(["a", "b"]).abort()
        assert omni.generate({"prompt": "c"}, output_kind="cumulative").text() == "c"


# outputs


@with_shared_system
async def test_cumulative_outputs_have_all_sound_so_far(omni: OmniSystem) -> None:
    outputs = [output async for output in omni.generate(script="one two three", output_kind="cumulative")]
    deltas = [output.delta.samples for output in outputs if isinstance(output.delta, AudioChunk)]
    assert len(deltas) == 3
    for count, output in enumerate(outputs[:3], 1):
        assert isinstance(output.total, AudioChunk)
        np.testing.assert_array_equal(output.total.samples, np.concatenate(deltas[:count]))
    sound = await omni.generate(script="one two three", output_kind="cumulative").audio()
    assert sound is not None
    np.testing.assert_array_equal(sound.samples, np.concatenate(deltas))
    assert all(output.total is None for output in [each async for each in omni.generate(script="one two")])


@with_shared_system
async def test_cumulative_text_is_counted_by_stage_and_index(omni: OmniSystem) -> None:
    pieces = [Input({"text": text, "index": index}) for text, index in (("a", 0), ("b", 1), ("c", 0))]
    outputs = [output async for output in omni.submit({"messages": pieces}, output_kind="cumulative")]
    assert [(output.delta, output.total) for output in outputs] == [("a", "a"), ("b", "b"), ("c", "ac")]


def test_the_cost_of_a_total_does_not_grow_with_it() -> None:
    total, copies = Total(), 0
    buffer = None
    for _ in range(1000):
        sound = total.add(AudioChunk(np.ones(10, np.float32), 8000))
        assert isinstance(sound, AudioChunk)
        copies += sound.samples.base is not buffer
        buffer = sound.samples.base
    assert len(sound.samples) == 10_000
    assert copies < 15


# modalities


@with_shared_system
async def test_modalities_that_are_no_names_are_refused(omni: OmniSystem) -> None:
    wrong: list[Any] = [5, "text", [5], [["text"]]]
    for modalities in wrong:
        with pytest.raises(InvalidRequest, match="expected a sequence of names") as refused:
            omni.generate("a", modalities=modalities)
        assert refused.value.param == "modalities"


@with_shared_system
async def test_without_modalities_a_request_gets_what_its_input_leads_to(omni: OmniSystem) -> None:
    assert [output.modality async for output in omni.generate("a")] == ["text"]
    assert {output.modality async for output in omni.generate(script="a")} == {"audio"}
    with pytest.raises(InvalidRequest, match="no route from input 'script'"):
        omni.generate("a", script="b")
    with pytest.raises(InvalidRequest, match="no input given"):
        omni.generate()


async def test_the_pipeline_may_name_the_modalities() -> None:
    both = Pipeline(
        name="both",
        modalities=("audio", "text"),
        stages={
            "first": Stage(engine="echo", accepts=("messages",), emits="text"),
            "second": Stage(engine="echo", accepts=("script",), inputs=("first",), emits="audio"),
        },
    )
    async with OmniSystem.open(both) as omni:
        assert {output.modality async for output in omni.generate("a")} == {"text", "audio"}
        assert {output.modality async for output in omni.generate(script="a")} == {"audio"}
        assert {output.modality async for output in omni.generate("a", modalities=["text"])} == {"text"}


async def test_an_unknown_default_modality_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"modalities\.0"):
        async with OmniSystem.open(SPEAKING, modalities=["smell"]):
            pytest.fail("it opened")


# parameters by stage

SPOKEN = Pipeline(
    name="spoken",
    stages={
        "thinker": Stage(engine="qwen3_thinker", accepts=("messages",), emits="text", defaults={"max_tokens": 9}),
        "talker": Stage(engine="qwen3_talker", inputs=("thinker",)),
        "code2wav": Stage(engine="qwen3_code2wav", inputs=("talker",), emits="audio"),
    },
)


def terms(**given: Any) -> Any:
    from omni_actors.system.terms import Terms

    return Terms(**given)


@pytest.mark.parametrize("own", [{"talker": {"seed": 7}, "thinker": {"top_k": 3}}, [{"top_k": 3}, {"seed": 7}, None]])
def test_a_stage_gets_its_own_parameters_over_those_of_all(own: Any) -> None:
    given = {"seed": 1, "max_tokens": 5}
    shares = Parameters(SPOKEN).by_stage(["thinker", "talker"], given, terms(sampling_params=own, priority=4))
    assert (shares["thinker"]["seed"], shares["talker"]["seed"]) == (1, 7)
    assert (shares["thinker"]["top_k"], shares["thinker"]["max_tokens"]) == (3, 5)
    assert (shares["thinker"]["priority"], shares["talker"]["priority"]) == (4, 4)
    alone = Parameters(SPOKEN).by_stage(["thinker"], {}, terms(sampling_params=own))
    assert alone.keys() == {"thinker"}
    assert alone["thinker"]["max_tokens"] == 9


@pytest.mark.parametrize(
    ("own", "param", "words"),
    [
        ({"talkr": {}}, "sampling_params", "the stages thinker, talker, code2wav"),
        ({"talker": {"temperature": 1}}, "sampling_params.talker", "'temperature'"),
        ({"talker": 3}, "sampling_params.talker", "a mapping"),
        ({"thinker": {"top_k": -2}}, "sampling_params.thinker.top_k", "top_k"),
        ({"code2wav": {"seed": 1}}, "sampling_params.code2wav", "none"),
        ([{}], "sampling_params", "one entry for each"),
        ("greedy", "sampling_params", "a mapping or a list"),
    ],
)
def test_parameters_that_do_not_fit_the_stages_are_refused(own: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        Parameters(SPOKEN).by_stage(["thinker"], {}, terms(sampling_params=own))
    assert refused.value.param == param


def test_arguments_that_no_engine_of_a_request_takes_are_unsupported() -> None:
    parameters = Parameters(SPOKEN)
    for name in ("mm_processor_kwargs", "tokenization_kwargs"):
        assert parameters.by_stage(["thinker", "talker"], {name: {}}).keys() == {"thinker", "talker"}
        with pytest.raises(Unsupported) as refused:
            parameters.by_stage(["talker"], {name: {}})
        assert (refused.value.stage, refused.value.capability, refused.value.param) == ("talker", name, name)
    for unknown in ({"mm_processor_kwargs": {"crop": 3}}, {"tokenization_kwargs": {"padding": True}}):
        with pytest.raises(InvalidRequest, match="unknown field"):
            parameters.by_stage(["thinker"], unknown)


@pytest.mark.parametrize("engine", ["vllm", "vllm_qwen2_5_thinker", "echo"])
def test_engines_without_guidance_do_not_support_it(engine: str) -> None:
    stages = {"mind": Stage(engine=engine, model="none", accepts=("messages",), emits="text")}
    parameters = Parameters(Pipeline(name="unguided", stages=stages))
    with pytest.raises(Unsupported) as refused:
        parameters.by_stage(["mind"], {"guidance_scale": 2.0, "negative_prompt": "the sea"})
    assert (refused.value.stage, refused.value.capability) == ("mind", "guidance_scale")


def test_the_sound_of_a_video_is_asked_for_by_either_name() -> None:
    kwargs = {"use_audio_in_video": True, "fps": 1}
    for prompt, given in (("a", kwargs), ({"prompt": "a", "mm_processor_kwargs": kwargs}, None)):
        found = prompts.processor_kwargs(prompt, given)
        assert found == {"use_audio_in_video": True, "mm_processor_kwargs": {"fps": 1}}
    assert prompts.processor_kwargs("a", {"use_audio_in_video": True}) == {"use_audio_in_video": True}
    assert prompts.processor_kwargs("a", None) == {}
    with pytest.raises(InvalidRequest, match="a mapping"):
        prompts.processor_kwargs("a", 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        {"priority": 1.5},
        {"priority": True},
        {"priority": 2**31},
        {"arrival_time": math.nan},
        {"arrival_time": -1},
        {"arrival_time": "now"},
        {"output_kind": "final"},
        {"deadline_s": -1},
        {"deadline_s": "5"},
        {"deadline_s": math.nan},
        {"deadline_s": math.inf},
        {"deadline_s": 10**400},
        {"arrival_time": 10**400},
        {"on_failure": "retry"},
        {"request_id": 5},
        {"request_id": "a \ud800"},
    ],
)
def test_a_wrong_term_is_refused(given: dict[str, Any]) -> None:
    [param] = given
    with pytest.raises(InvalidRequest) as refused:
        terms(**given)
    assert refused.value.param == param


# priority and time of arrival


def numbers(generations: list[Generation]) -> list[int | None]:
    return [generation.stream.request.number for generation in generations]


async def test_of_waiting_requests_the_lowest_priority_value_is_dispatched_first() -> None:
    """And of one priority, the first that arrived. A full system refuses the last of the order."""
    async with OmniSystem.open(SPEAKING, wait_ready=False) as omni:
        now = time.time()
        waiting = [omni.generate("a", priority=each) for each in (3, 0, -1)]
        waiting += [omni.generate("a", priority=3, arrival_time=now - 5), omni.generate("a", priority=3)]
        lowest = omni.generate("a", priority=8)
        with pytest.raises(Overloaded):
            omni.generate("a", priority=8)
        assert omni.in_flight == LIMIT
        urgent = omni.generate("a", priority=-2)
        assert omni.in_flight == LIMIT
        with pytest.raises(Overloaded):
            await lowest.text()
        await omni.wait_ready()
        assert [await each.text() for each in (*waiting, urgent)] == ["a"] * 6
        assert numbers([urgent, *waiting]) == [1, 5, 3, 2, 4, 6]


@with_shared_system
async def test_what_runs_keeps_its_place(omni: OmniSystem) -> None:
    running = []
    for _ in range(LIMIT):
        send, receive = trio.open_memory_channel[Input](0)
        running.append((omni.submit({"messages": receive}, priority=9), send))
    with pytest.raises(Overloaded):
        omni.generate("a", priority=-9)
    for generation, _ in running:
        generation.abort()


@with_shared_system
async def test_metrics_count_from_the_time_of_arrival(omni: OmniSystem) -> None:
    answer = await omni.generate("a", arrival_time=time.time() - 100).collect()
    assert answer.metrics is not None
    assert 100 <= answer.metrics.ttft_s <= answer.metrics.total_s < 100 + WATCHDOG_S
    assert answer.metrics.stages["text"].started_s >= 100
    future = await omni.generate("a", arrival_time=time.time() + 100).collect()
    assert future.metrics is not None
    assert 0 <= future.metrics.total_s < WATCHDOG_S
