"""OpenAI's own Python client, unchanged: ``client.realtime.connect``, blocking and for asyncio."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import numpy as np
import openai
import pytest

from omni_actors.serve.realtime.tools import MAX_TOOLS_BYTES
from tests.support.http_server import NO_TLS, Server, Start
from tests.support.realtime import PCM_S, session

# The client calls websockets in a way that its newest version deprecates.
pytestmark = pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager:DeprecationWarning")


def test_the_blocking_client(studio: Server) -> None:
    with studio.openai() as client, client.realtime.connect(model="studio") as connection:
        connection.session.update(session={"type": "realtime", "output_modalities": ["text"]})
        connection.conversation.item.create(
            item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}
        )
        connection.response.create()
        texts = []
        for event in connection:
            if event.type == "response.output_text.delta":
                texts.append(event.delta)
            elif event.type == "response.done":
                assert event.response.status == "completed"
                break
        assert "".join(texts) == "hello" * 3


def test_the_client_for_asyncio_hears_and_speaks(studio: Server) -> None:
    async def talk() -> tuple[bytes, str]:
        sound, words = b"", ""
        http = openai.DefaultAsyncHttpxClient(verify=NO_TLS)
        async with (
            openai.AsyncOpenAI(base_url=f"{studio.url}/v1", api_key="none", http_client=http) as client,
            client.realtime.connect(model="studio") as connection,
        ):
            await connection.input_audio_buffer.append(audio=base64.b64encode(bytes(24000)).decode())
            await connection.input_audio_buffer.commit()
            await connection.response.create()
            async for event in connection:
                if event.type == "response.output_audio.delta":
                    sound += base64.b64decode(event.delta)
                elif event.type == "response.output_audio_transcript.done":
                    words = event.transcript
                elif event.type == "response.done":
                    break
        return sound, words

    sound, words = asyncio.run(talk())
    assert words == "0.5 s at 24000 Hz" * 3
    assert abs(len(sound) / 48000 - 1.5) < 0.01


def test_a_long_recording_is_retrieved_as_it_was_sent(studio: Server) -> None:
    """The server sends it in fragments."""
    audio = base64.b64encode(np.random.default_rng(0).bytes(119 * PCM_S)).decode()
    with studio.openai() as client:
        options: Any = {"max_size": None}
        with client.realtime.connect(model="studio", websocket_connection_options=options) as connection:
            part: Any = {"type": "input_audio", "audio": audio}
            connection.conversation.item.create(item={"type": "message", "role": "user", "content": [part]})
            for event in connection:
                assert event.type != "error", event
                if event.type == "conversation.item.done":
                    assert event.item.id is not None
                    connection.conversation.item.retrieve(item_id=event.item.id)
                elif event.type == "conversation.item.retrieved":
                    assert event.item.type == "message"
                    assert event.item.role == "user"
                    assert event.item.content[0].audio == audio
                    break


CITY: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
}


def test_a_function_is_called_and_its_result_taken(writer: Server) -> None:
    """The model has random weights. So the choice is made for it, and what it writes follows the schema."""
    with writer.openai() as client, client.realtime.connect(model="writer") as connection:
        config: Any = {"type": "realtime", "tools": [CITY], "tool_choice": {"type": "function", "name": "weather"}}
        connection.session.update(session=config)
        connection.conversation.item.create(
            item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Is it warm in Rome?"}]}
        )
        connection.response.create(response={"max_output_tokens": 100})
        deltas, call = [], None
        for event in connection:
            assert event.type != "error", event
            if event.type == "response.function_call_arguments.delta":
                deltas.append(event.delta)
            elif event.type == "response.function_call_arguments.done":
                assert "".join(deltas) == event.arguments
                call = event
            elif event.type == "response.done":
                assert event.response.status == "completed", event.response.status_details
                assert event.response.usage is not None
                assert (event.response.usage.output_tokens or 0) > 5
                break
        assert call is not None
        assert call.name == "weather"
        assert call.arguments.replace(" ", "") in ('{"city":"Rome"}', '{"city":"Oslo"}')
        connection.conversation.item.create(
            item={"type": "function_call_output", "call_id": call.call_id, "output": "It is warm."}
        )
        connection.response.create(response={"tool_choice": "none", "max_output_tokens": 5})
        for event in connection:
            assert event.type != "error", event
            if event.type == "response.done":
                assert event.response.status in ("completed", "incomplete"), event.response.status_details
                break


def test_tools_that_no_response_could_use_are_refused_when_they_are_set(writer: Server) -> None:
    def city(size: int) -> dict[str, Any]:
        return {**CITY, "parameters": {**CITY["parameters"], "description": "x" * size}}

    with session(writer) as talk:
        for tools in ([city(8_000_000)], [{**city(1000), "name": f"f{number}"} for number in range(128)]):
            error = talk.error("session.update", session={"tools": tools})
            assert (error["param"], error["code"]) == ("session.tools", "tools_too_large")
            error = talk.error("response.create", response={"tools": tools})
            assert (error["param"], error["code"]) == ("response.tools", "tools_too_large")
        choice = {"type": "function", "name": "nope"}
        assert talk.error("session.update", session={"tool_choice": choice})["param"] == "session.tool_choice.name"
        assert talk.error("response.create", response={"tool_choice": choice})["param"] == "response.tool_choice.name"
        talk.send("session.update", session={})
        assert talk.receive()["session"]["tools"] == []


@pytest.mark.parametrize(
    ("share", "choice"), [(1, "auto"), (2, "required"), (2, {"type": "function", "name": "weather"})]
)
def test_the_largest_tools_reach_the_model(writer: Server, share: int, choice: Any) -> None:
    """They exceed its context. Their size was not refused."""
    parameters = {**CITY["parameters"], "description": "x" * (MAX_TOOLS_BYTES // share - 500)}
    with session(writer) as talk:
        talk.send("session.update", session={"tools": [{**CITY, "parameters": parameters}], "tool_choice": choice})
        assert talk.receive()["type"] == "session.updated"
        talk.ask("Is it warm in Rome?")
        [done] = [event["response"] for event in talk.respond() if event["type"] == "response.done"]
        assert done["status_details"]["error"]["code"] == "context_length_exceeded"


def test_a_call_that_is_cut_by_its_length_does_not_break_the_conversation(writer: Server) -> None:
    with session(writer) as talk:
        choice = {"type": "function", "name": "weather"}
        talk.send("session.update", session={"tools": [CITY], "tool_choice": choice})
        talk.until("session.updated")
        talk.ask("Is it warm in Rome?")
        done = talk.respond(max_output_tokens=3)[-1]["response"]
        assert (done["status"], done["status_details"]["reason"]) == ("incomplete", "max_output_tokens")
        [call] = done["output"]
        assert call["status"] == "incomplete"
        with pytest.raises(json.JSONDecodeError):
            json.loads(call["arguments"])
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "It is warm."}
        talk.send("conversation.item.create", item=output)
        talk.until("conversation.item.done")
        done = talk.respond(tool_choice="none", max_output_tokens=5)[-1]["response"]
        assert done["status"] in ("completed", "incomplete"), done["status_details"]


@pytest.mark.parametrize("refusal", ["empty", "nothing_to_speak"])
def test_an_answer_without_anything_to_pronounce_is_complete_without_sound(
    start: Start, writer_config: str, refusal: str
) -> None:
    """With tools, a second request speaks the text. Without, the voice ends an answer without sound by itself."""
    mouth = f"""\
  mouth:
    engine: "tests.support.served_engines:Mute"
    accepts: [script]
    inputs: [mind]
    emits: audio
    options: {{refusal: {refusal}}}
"""
    with start(config=writer_config + mouth) as server, session(server) as talk:
        talk.send("session.update", session={"tools": [CITY]})
        talk.until("session.updated")
        talk.ask("Is it warm in Rome?")
        events = talk.respond(max_output_tokens=20)
        done = events[-1]["response"]
        assert done["status"] in ("completed", "incomplete"), done["status_details"]
        assert done["output"][0]["content"][0]["transcript"].strip()
        assert "response.output_audio.delta" not in [event["type"] for event in events]


def test_a_call_that_is_cut_before_its_name_is_known_is_no_text(writer: Server) -> None:
    """A session that speaks would read it out."""
    with session(writer) as talk:
        talk.send("session.update", session={"tools": [CITY], "tool_choice": "required"})
        talk.until("session.updated")
        talk.ask("Is it warm in Rome?")
        done = talk.respond(max_output_tokens=3)[-1]["response"]
        assert (done["status"], done["output"]) == ("incomplete", [])


def test_a_call_with_an_integer_of_any_size_does_not_break_the_conversation(writer: Server) -> None:
    with session(writer) as talk:
        talk.ask("Is it warm in Rome?")
        call = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": f'{{"n": {2**64}}}'}
        output = {"type": "function_call_output", "call_id": "call_1", "output": "It is warm."}
        for item in (call, output):
            talk.send("conversation.item.create", item=item)
            talk.until("conversation.item.done")
        done = talk.respond(max_output_tokens=5)[-1]["response"]
        assert done["status"] in ("completed", "incomplete"), done["status_details"]


def test_a_conversation_that_is_too_long_for_the_model(writer: Server) -> None:
    """Its context has 512 tokens."""
    with session(writer) as talk:
        for _ in range(6):
            talk.ask("word " * 40)
        talk.send("session.update", session={"truncation": "disabled"})
        assert talk.receive()["type"] == "session.updated"
        failed = talk.respond(max_output_tokens=4)[-1]["response"]
        assert failed["status_details"]["error"]["code"] == "context_length_exceeded"
        talk.send("session.update", session={"truncation": "auto"})
        talk.receive()
        assert talk.respond(max_output_tokens=4)[-1]["response"]["status"] in ("completed", "incomplete")


def test_the_longest_answer_ends_with_the_context(writer: Server) -> None:
    """A session begins with the pipeline's default, and "inf" asks for as much as the context of 512 tokens holds."""
    with session(writer) as talk:
        talk.ask("Is it warm in Rome?")
        for asked, told in (
            ({}, 256),
            ({"max_output_tokens": "inf"}, "inf"),
            ({"max_output_tokens": 1_000_000}, 10**6),
        ):
            done = talk.respond(**asked, conversation="none")[-1]["response"]
            assert done["max_output_tokens"] == told
            assert done["status_details"] == {"type": "incomplete", "reason": "max_output_tokens"}
            assert done["usage"]["total_tokens" if asked else "output_tokens"] == (512 if asked else 256)
        talk.send("session.update", session={"instructions": "Be brief."})
        assert talk.receive()["session"]["max_output_tokens"] == 256
        talk.send("session.update", session={"max_output_tokens": "inf"})
        assert talk.receive()["session"]["max_output_tokens"] == "inf"
        done = talk.respond(conversation="none")[-1]["response"]
        assert (done["max_output_tokens"], done["usage"]["total_tokens"]) == ("inf", 512)


def test_a_wrong_key_is_an_error_of_the_client(start: Start) -> None:
    with start(config="echo", api_key="sesame") as server, server.openai("open") as client:
        with pytest.raises(Exception, match="401"), client.realtime.connect(model="echo", max_retries=0):
            pass
        with server.openai() as right, right.realtime.connect(model="echo") as connection:
            assert connection.recv().type == "session.created"
