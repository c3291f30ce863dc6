"""The responses API, as OpenAI's own client uses it. Each event and object is checked against the client's types."""

from __future__ import annotations

import base64
import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

import msgspec
import openai
import pytest
import trio
from openai.types.responses import Response as ResponseObject
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from omni_actors.serve import app, response_store
from omni_actors.serve.api.json_body import DecodingCost
from omni_actors.serve.api.schemas import ChatMessage
from omni_actors.serve.response_store import Conversation, ResponseStore
from omni_actors.serve.server import serve
from omni_actors.serve.settings import ServerSettings
from tests.support.http_server import NO_TLS, WATCHDOG_S, Server, Start

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]


@pytest.fixture
def author(writer: Server) -> Iterator[openai.OpenAI]:
    with writer.openai() as client:
        yield client


def ask(client: openai.OpenAI, model: str = "studio", **arguments: Any) -> Any:
    return client.responses.create(**{"model": model, "input": "hello there", **arguments})


def write(client: openai.OpenAI, **arguments: Any) -> Any:
    return ask(client, "writer", **{"max_output_tokens": 8, **arguments})


@asynccontextmanager
async def echo_client() -> AsyncIterator[openai.AsyncOpenAI]:
    """Run a server in this event loop during the block, and yield a client of it."""
    run = partial(serve, "echo", ServerSettings(port=0), announce=None, handles_signals=False)
    with trio.fail_after(WATCHDOG_S):
        async with trio.open_nursery() as nursery:
            url = await nursery.start(run)
            http = openai.DefaultAsyncHttpxClient(verify=NO_TLS)
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http) as client:
                yield client
            nursery.cancel_scope.cancel()


def raw_events(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """Return the events of a stream as they were sent, after checking them."""
    body = {"input": "hello there", "stream": True, **fields}
    answer = server.http.post("/v1/responses", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    found = []
    for event in answer.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        EVENT.validate_json(data.removeprefix("data: "), strict=True)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of events, each repetition once."""
    names = [event["type"] for event in events]
    return [name for at, name in enumerate(names) if at == 0 or name != names[at - 1]]


def test_a_text_is_answered(client: openai.OpenAI, studio: Server) -> None:
    answer = ask(client, metadata={"a": "b"}, instructions="Be brief.")
    assert answer.output_text == "hello there" * 3, "the engine repeats the newest message"
    assert (answer.status, answer.object, answer.metadata) == ("completed", "response", {"a": "b"})
    [item] = answer.output
    assert (item.role, item.status, item.content[0].annotations) == ("assistant", "completed", [])
    raw = studio.http.post("/v1/responses", json={"model": "studio", "input": "hello"}).content
    ResponseObject.model_validate_json(raw, strict=True)


def test_a_stream_has_openais_events_in_order(studio: Server) -> None:
    events = raw_events(studio, model="studio")
    assert kinds(events) == [*TEXT_EVENTS, "response.completed"]
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    final = events[-1]["response"]
    assert text == final["output"][0]["content"][0]["text"] != ""
    created = events[0]["response"]
    assert (created["status"], created["output"], created["id"]) == ("in_progress", [], final["id"])


def test_the_clients_own_stream_collects_the_response(client: openai.OpenAI) -> None:
    with client.responses.stream(model="studio", input="one two") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text


def test_a_cut_answer_is_incomplete(author: openai.OpenAI, writer: Server) -> None:
    answer = write(author)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == 8
    assert answer.usage.total_tokens == answer.usage.input_tokens + 8
    events = raw_events(writer, model="writer", max_output_tokens=8)
    assert kinds(events) == [*TEXT_EVENTS, "response.incomplete"]


def test_a_call_of_a_tool_and_its_result(author: openai.OpenAI, writer: Server) -> None:
    asked: Any = {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 100}
    answer = write(author, **asked)
    [call] = answer.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    events = raw_events(writer, model="writer", **asked)
    assert kinds(events) == [
        *TEXT_EVENTS[:3],
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    done = next(event for event in events if event["type"] == "response.function_call_arguments.done")
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas) == done["arguments"] == events[-1]["response"]["output"][0]["arguments"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    by_id = write(author, previous_response_id=answer.id, input=[result], tools=[WEATHER], temperature=0)
    items = [{"role": "user", "content": "hello there"}, call.model_dump(), result]
    by_items = write(author, input=items, tools=[WEATHER], temperature=0)
    assert by_id.output_text == by_items.output_text


def test_a_conversation_goes_on_after_a_call_that_was_cut(author: openai.OpenAI) -> None:
    asked: Any = {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 4}
    answer = write(author, **asked)
    [call] = answer.output
    assert (answer.status, call.status) == ("incomplete", "incomplete")
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.arguments)
    assert write(author, previous_response_id=answer.id, input="go on").status == "incomplete"


def test_the_methods_of_a_response_are_named(studio: Server) -> None:
    answer = studio.http.patch("/v1/responses/resp_1")
    assert answer.status_code == 405
    assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD", "DELETE"}


def test_a_structured_answer_is_parsed(author: openai.OpenAI) -> None:
    answer = author.responses.parse(model="writer", input="hello", text_format=Weather, max_output_tokens=100)
    assert isinstance(answer.output_parsed, Weather)
    text: Any = {"format": {"type": "json_schema", "name": "w", "schema": WEATHER["parameters"]}}
    assert Weather.model_validate_json(write(author, text=text, max_output_tokens=100).output_text)


def test_parameters_of_engines_reach_them(gallery: Any) -> None:
    with gallery.server.openai() as client:
        answer = ask(client, "gallery", temperature=0.5, top_p=0.9, extra_body={"seed": 5, "top_k": 7})
    given = json.loads(answer.output_text.splitlines()[0])["params"]
    assert given == {"temperature": 0.5, "top_p": 0.9, "seed": 5, "top_k": 7}


def test_a_conversation_goes_on_from_a_stored_response(author: openai.OpenAI) -> None:
    first = write(author, temperature=0, instructions="Speak.")
    second = write(author, temperature=0, input="And now?", previous_response_id=first.id)
    third = write(author, temperature=0, input="Then?", previous_response_id=second.id)
    turns = ["hello there", first.output_text, "And now?", second.output_text, "Then?"]
    items: Any = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(turns)]
    again = write(author, temperature=0, input=items)
    assert (again.output_text, again.usage.input_tokens) == (third.output_text, third.usage.input_tokens)
    assert third.previous_response_id == second.id


def test_a_conversation_by_id_has_the_bound_of_a_body(client: openai.OpenAI) -> None:
    items: Any = [{"role": "user", "content": ""}] * 1500
    first = ask(client, input=items)
    with pytest.raises(openai.BadRequestError, match="more than 20000 values in all") as caught:
        ask(client, input=items, previous_response_id=first.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "conversation_too_large")
    assert ask(client, input=items[:300], previous_response_id=first.id).status == "completed"


async def test_each_message_of_a_conversation_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    measure = response_store._measure

    def count(messages: Sequence[ChatMessage]) -> tuple[int, int]:
        measured.append(len(messages))
        return measure(messages)

    monkeypatch.setattr(response_store, "_measure", count)
    async with echo_client() as client:
        answer = None
        for _ in range(3):
            id = answer.id if answer else None
            answer = await client.responses.create(model="echo", input="hello", previous_response_id=id)
    assert sum(measured) == 3 * 2, "a question and an answer"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,", "detail": "auto"}}]},
        {"role": "tool", "content": "sunny", "tool_call_id": "x"},
        {
            "role": "assistant",
            "content": "well",
            "tool_calls": [{"type": "function", "id": "x", "function": {"name": "weather", "arguments": "{}"}}],
        },
    ],
)
def test_the_values_of_messages_are_those_of_their_json(message: dict[str, Any]) -> None:
    cost = DecodingCost()
    cost.add(json.dumps([message] * 3).encode())
    given = Conversation().extended(msgspec.convert([message] * 3, list[ChatMessage]))
    assert given.values + 1 == cost._values, "a list has one comma less than values, and two brackets"


def test_a_stored_response_is_read_and_deleted(client: openai.OpenAI, studio: Server) -> None:
    kept = ask(client)
    assert client.responses.retrieve(kept.id).output_text == kept.output_text
    with pytest.raises(openai.BadRequestError, match="has ended"):
        client.responses.cancel(kept.id)
    client.responses.delete(kept.id)
    for act in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            act(kept.id)
    dropped = ask(client, store=False)
    assert dropped.model_dump()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(dropped.id)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, previous_response_id=dropped.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


def test_a_running_response_is_cancelled(slow: Server) -> None:
    with slow.openai() as client, ask(client, stream=True) as stream:
        first = next(iter(stream))
        assert client.responses.retrieve(first.response.id).status == "in_progress"
        assert client.responses.cancel(first.response.id).status == "cancelled"
        last = list(stream)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    slow.wait_metric("omni_requests_in_flight", 0)


def test_the_live_state_does_not_show_the_id_that_protects_a_response(client: openai.OpenAI, studio: Server) -> None:
    kept = ask(client)
    requests = studio.http.get("/v1/state").json()["requests"]
    [name] = [name for name in requests if kept.id.startswith(name)]
    assert requests[name]["state"] == "done"
    assert len(kept.id) - len(name) == 20
    for act in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            act(name)
    with pytest.raises(openai.BadRequestError, match="there is no response"):
        ask(client, previous_response_id=name)


def test_a_response_whose_last_events_are_being_sent_has_ended(studio: Server) -> None:
    """The client reads the first pieces of its answer only. The last events repeat the answer: the sockets are full."""
    body = json.dumps({"model": "studio", "input": "x" * 300_000, "stream": True}).encode()
    head = b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with socket.socket() as sock, studio.openai() as client:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        sock.settimeout(WATCHDOG_S)
        sock.connect(("127.0.0.1", studio.port))
        sock.sendall(head % len(body) + body)
        received = b""
        while (found := re.search(rb'"id":"(resp_\w+)"', received)) is None:
            received += sock.recv(4096)
        id = found[1].decode()
        read = len(received)
        while read < 1_000_000:  # the pieces of the answer, and the first of the events that repeat it
            read += len(sock.recv(1 << 16))
        studio.wait(lambda: client.responses.retrieve(id).status == "completed", "the answer to be complete")
        with pytest.raises(openai.BadRequestError, match="has ended"):
            client.responses.cancel(id)
        assert client.responses.retrieve(id).status == "completed"
    studio.wait_metric("omni_requests_in_flight", 0)


async def test_a_response_that_is_too_large_to_be_kept_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "ResponseStore", partial(ResponseStore, max_bytes=3000))
    async with echo_client() as client:
        for text, is_kept in (("hello", True), ("hello " * 500, False)):
            whole = await client.responses.create(model="echo", input=text)
            stream = await client.responses.create(model="echo", input=text, stream=True)
            last = [event async for event in stream][-1]
            assert last.type == "response.completed"
            for each in (whole, last.response):
                assert each.model_dump()["store"] is is_kept


def test_a_recording_in_the_input_is_heard(client: openai.OpenAI, recording: Callable[..., bytes]) -> None:
    data = base64.b64encode(recording(2.0)).decode()
    sound = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "What is it?"}, sound]}]
    assert "2.0 s at 16000 Hz" in ask(client, input=items).output_text


def test_a_spoken_answer_is_streamed(studio: Server) -> None:
    asked = {"modalities": ["text", "audio"], "audio": {"format": "pcm16", "voice": "any"}}
    events = raw_events(studio, model="studio", **asked)
    names = [event["type"] for event in events]
    assert {"response.audio.delta", "response.audio.transcript.delta"} < set(names)
    assert names.index("response.audio.done") > max(at for at, name in enumerate(names) if name.endswith("audio.delta"))
    sound = b"".join(base64.b64decode(e["delta"]) for e in events if e["type"] == "response.audio.delta")
    assert len(sound) / 2 / 24000 > 0.1
    transcript = "".join(e["delta"] for e in events if e["type"] == "response.audio.transcript.delta")
    assert transcript == events[-1]["response"]["output"][0]["content"][0]["text"]
    assert not any("transcript_end" in event for event in events)
    asked["audio"] = {**asked["audio"], "word_timing": True}
    events = raw_events(studio, model="studio", **asked)
    ends = [(event["type"], event["transcript_end"]) for event in events if "transcript_end" in event]
    assert ends == [("response.audio.done", len(transcript))], "the pipeline names no sentence"


@pytest.mark.slow
def test_a_failure_after_the_first_output_ends_the_stream_with_an_event(start: Start) -> None:
    asked = {"modalities": ["text", "audio"], "audio": {"format": "pcm16", "voice": "any"}}
    with start() as server:
        events = raw_events(server, model="studio", input="well well deadly", **asked)
    failed = events[-1]
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "server_error"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"}]}, "input[0].type"),
        (
            {
                "input": [
                    {"role": "assistant", "content": "well"},
                    {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"},
                ]
            },
            "input[1].type",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input[0].role"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "time"}}, "tool_choice.name"),
        (
            {"tools": [WEATHER], "tool_choice": "required", "text": {"format": {"type": "json_object"}}},
            "text.format",
        ),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
def test_what_is_refused(studio: Server, changes: dict[str, Any], param: str) -> None:
    answer = studio.http.post("/v1/responses", json={"model": "studio", "input": "hello", **changes})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "before",
    [
        [],
        [{"role": "assistant", "content": "well"}],
        [{"type": "function_call", "call_id": "y", "name": "weather", "arguments": "{}"}],
        [
            {"role": "assistant", "content": "well"},
            {"type": "function_call", "call_id": "y", "name": "weather", "arguments": "{}"},
        ],
    ],
)
def test_arguments_of_a_call_that_are_not_json_are_refused_by_their_place(author: openai.OpenAI, before: Any) -> None:
    call = {"type": "function_call", "call_id": "x", "name": "weather", "arguments": "{"}
    with pytest.raises(openai.BadRequestError) as caught:
        write(author, input=[{"role": "user", "content": "hello"}, *before, call])
    assert caught.value.param == f"input[{1 + len(before)}].arguments"
    assert caught.value.body["message"].startswith(f"{caught.value.param}: ")  # type: ignore[index]


@pytest.mark.parametrize("input", ["", "hello " * 2000])
def test_a_prompt_that_the_model_refuses_is_the_input(author: openai.OpenAI, input: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        write(author, input=input)
    assert caught.value.param == "input"


def conversation(length: int, count: int = 1) -> Conversation:
    return Conversation().extended([ChatMessage(role="user", content="x" * length)] * count)


def test_a_store_keeps_the_newest_responses_within_its_bounds() -> None:
    store = ResponseStore(max_responses=3, max_bytes=4000)
    for number in range(5):
        store.put(str(number), {"n": number}, conversation(500), "a")
    assert [number for number in range(5) if store.get(str(number))] == [2, 3, 4]
    assert store.put("large", {}, conversation(500, count=5), "a")
    assert store.get("large")
    assert store.bytes <= 4000
    assert not store.put("too large", {}, conversation(500, count=9), "a")
    assert store.get("too large") is None
    assert store.get("large")
    assert store.delete("large")
    assert not store.delete("large")
    assert store.bytes == sum(found.size for number in range(5) if (found := store.get(str(number))))


def test_all_addresses_of_a_network_have_one_share_of_the_store() -> None:
    store = ResponseStore(max_responses=4)
    for id in "ab":
        assert store.put(id, {}, conversation(10), "192.0.2.1")
    for number in range(20):
        store.put(str(number), {}, conversation(10), f"2001:db8::{number:x}")
    assert store.get("a")
    assert store.get("b")


@pytest.mark.parametrize(("count", "length"), [(30, 10), (3, 1900)])
def test_no_address_makes_the_store_forget_the_responses_of_others(count: int, length: int) -> None:
    store = ResponseStore(max_responses=10, max_bytes=4500)
    kept = [f"{address}{number}" for address in "abc" for number in range(2)]
    for id in kept:
        assert store.put(id, {}, conversation(10), id[0])
    for number in range(count):
        assert store.put(f"d{number}", {}, conversation(length), "d")
    assert all(store.get(id) for id in kept)
    assert store.get(f"d{count - 1}")
    assert not store.get("d0")
    assert not store.put("d", {}, conversation(4300), "d"), "without those of others it fits"
    assert all(store.get(id) for id in kept)
    assert store.bytes == sum(store.get(id).size for id in kept)
