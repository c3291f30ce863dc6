"""Sessions without models: the events, their order, and what is refused."""

from __future__ import annotations

import base64
import json
import signal
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from omni_actors.serve.media.base64_data import to_base64
from omni_actors.serve.realtime.session_responses import MOST_APART
from tests.support.http_server import Start
from tests.support.realtime import PCM_S, Session, session, silence

TEXT: Any = {"output_modalities": ["text"]}
RECORDING: Any = {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": "AAAA"}]}
CALL: Any = {"type": "function_call", "name": "x", "arguments": "{}"}


def sound(seconds: float) -> str:
    """Silence in base64."""
    return to_base64(silence(seconds))


def closed_with(talk: Session) -> int:
    """Return the code with which the server closes the session."""
    with pytest.raises(ConnectionClosed) as caught:
        talk.receive()
    assert caught.value.rcvd is not None
    return int(caught.value.rcvd.code)


def names(events: list[dict[str, Any]]) -> list[str]:
    """The types of events, each sequence of equal ones once."""
    found = [event["type"] for event in events]
    return [name for at, name in enumerate(found) if at == 0 or found[at - 1] != name]


def test_the_error_of_a_response_has_the_name_of_the_clients_field(talk: Session) -> None:
    talk.ask("hello")
    error = talk.respond(**TEXT, max_output_tokens=5)[-1]["response"]["status_details"]["error"]
    assert error["message"] == "no stage of this request takes the parameter 'max_output_tokens'"


def test_a_written_answer(talk: Session) -> None:
    question = talk.ask("hello")
    assert question["content"] == [{"type": "input_text", "text": "hello"}]
    events = talk.respond(**TEXT, metadata={"topic": "greeting"})
    assert names(events) == [
        "response.created",
        "rate_limits.updated",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "conversation.item.done",
        "response.output_item.done",
        "response.done",
    ]
    created, done = events[0]["response"], events[-1]["response"]
    assert (created["status"], done["status"]) == ("in_progress", "completed")
    assert created["id"] == done["id"]
    assert created["conversation_id"] == done["conversation_id"]
    assert done["metadata"] == {"topic": "greeting"}
    [item] = done["output"]
    assert item["content"] == [{"type": "output_text", "text": "hello" * 3}]
    added = next(event for event in events if event["type"] == "conversation.item.added")
    assert added["previous_item_id"] == question["id"]
    assert added["item"]["status"] == "in_progress"
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "hello" * 3


def test_a_spoken_question_and_a_spoken_answer(talk: Session) -> None:
    talk.send("session.update", session={"type": "realtime", "audio": {"input": {"transcription": {"model": "x"}}}})
    updated = talk.receive()
    assert updated["type"] == "session.updated"
    assert updated["session"]["audio"]["input"]["transcription"] == {"model": "x", "language": None, "prompt": None}
    data = bytes(PCM_S)
    talk.hear(data, 4801)  # frames are cut
    talk.send("input_audio_buffer.commit")
    committed, added, done = (talk.receive() for _ in range(3))
    assert committed["type"] == "input_audio_buffer.committed"
    assert committed["item_id"] == added["item"]["id"] == done["item"]["id"]
    heard = talk.until("conversation.item.input_audio_transcription.completed")
    assert heard[-1]["transcript"] == "1.0 s at 24000 Hz"
    assert heard[-1]["usage"] == {"type": "duration", "seconds": 1.0}
    assert "".join(event["delta"] for event in heard[:-1]) == "1.0 s at 24000 Hz"
    events = talk.respond()
    order = names(events)
    assert order[-6:] == [
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.content_part.done",
        "conversation.item.done",
        "response.output_item.done",
        "response.done",
    ]
    assert {"response.output_audio.delta", "response.output_audio_transcript.delta"} <= set(order)
    [item] = events[-1]["response"]["output"]
    assert item["content"] == [{"type": "output_audio", "transcript": "1.0 s at 24000 Hz" * 3}]
    pieces = [event["delta"] for event in events if event["type"] == "response.output_audio.delta"]
    samples = np.frombuffer(b"".join(map(base64.b64decode, pieces)), "<i2")
    words = 3 * 5  # "1.0 s at 24000 Hz", three times
    assert abs(len(samples) / 24000 - words * 0.1) < 0.01
    assert abs(np.median(samples) / 32767 - 0.5) < 0.01
    talk.send("conversation.item.retrieve", item_id=committed["item_id"])
    [part] = talk.receive()["item"]["content"]
    assert base64.b64decode(part["audio"]) == data
    assert part["transcript"] == "1.0 s at 24000 Hz"


@pytest.mark.parametrize("law", ["audio/pcmu", "audio/pcma"])
def test_telephone_sound_both_ways(talk: Session, law: str) -> None:
    format = {"format": {"type": law}}
    audio = {"input": {**format, "transcription": {"model": "x"}}, "output": format}
    talk.send("session.update", session={"type": "realtime", "audio": audio})
    assert talk.receive()["session"]["audio"]["output"]["format"] == {"type": law}
    talk.send("input_audio_buffer.append", audio=base64.b64encode(b"\xd5" * 8000).decode())
    talk.send("input_audio_buffer.commit")
    assert talk.until("conversation.item.input_audio_transcription.completed")[-1]["transcript"] == "1.0 s at 8000 Hz"
    events = talk.respond()
    pieces = [event["delta"] for event in events if event["type"] == "response.output_audio.delta"]
    words = 3 * 5
    assert abs(sum(len(base64.b64decode(piece)) for piece in pieces) / 8000 - words * 0.1) < 0.01


def test_the_events_of_a_response_name_a_voice_object_by_its_id(talk: Session) -> None:
    """OpenAI's client has an object for the voice of a session, and a name alone for that of a response."""
    talk.send("session.update", session={"audio": {"output": {"voice": {"id": "voice_1"}}}})
    assert talk.receive()["session"]["audio"]["output"]["voice"] == {"id": "voice_1"}
    talk.ask("word")
    response = talk.respond()[-1]["response"]
    assert response["audio"]["output"]["voice"] == "voice_1"


def test_items_are_inserted_deleted_and_retrieved(talk: Session) -> None:
    def create(text: str, **place: str) -> dict[str, Any]:
        item = {"id": text, "type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}
        talk.send("conversation.item.create", item=item, **place)
        return talk.until("conversation.item.done")[-1]

    assert create("b")["previous_item_id"] is None
    assert create("c")["previous_item_id"] == "b"
    assert create("a", previous_item_id="root")["previous_item_id"] is None
    assert create("bb", previous_item_id="b")["previous_item_id"] == "b"
    talk.send("conversation.item.delete", item_id="c")
    assert talk.receive()["item_id"] == "c"
    assert talk.error("conversation.item.retrieve", item_id="c")["code"] == "item_not_found"
    again = {"id": "b", "type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]}
    assert "already" in talk.error("conversation.item.create", item=again)["message"]
    events = talk.respond(**TEXT)
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "bb" * 3


def test_a_recording_may_be_as_long_as_a_turn(talk: Session) -> None:
    part = {"type": "input_audio", "audio": to_base64(silence(120))}
    talk.send("conversation.item.create", item={"type": "message", "role": "user", "content": [part]})
    assert talk.until("conversation.item.done")[-1]["item"]["role"] == "user"


def test_a_response_out_of_the_conversation_with_its_own_input(talk: Session) -> None:
    talk.ask("kept")
    other = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "other"}]}
    events = talk.respond(**TEXT, conversation="none", input=[other])
    assert "conversation.item.added" not in names(events)
    assert events[-1]["response"]["conversation_id"] is None
    [item] = events[-1]["response"]["output"]
    assert item["content"][0]["text"] == "other" * 3
    assert talk.error("conversation.item.retrieve", item_id=item["id"])["code"] == "item_not_found"
    events = talk.respond(**TEXT)
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "kept" * 3


def test_responses_out_of_the_conversation_run_beside_it_and_are_bounded(talk: Session) -> None:
    talk.ask("word " * 50)
    talk.send("response.create")
    talk.until("response.output_audio.delta")
    question = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "word " * 50}]}
    for _ in range(MOST_APART):
        talk.send("response.create", response={"conversation": "none", "input": [question]})
    talk.send("response.create", event_id="mine", response={"conversation": "none", "input": [question]})
    error = talk.until("error")[-1]["error"]
    assert (error["code"], error["event_id"]) == ("too_many_responses", "mine")
    talk.send("response.cancel")  # the conversation's
    assert talk.until("response.done")[-1]["response"]["conversation_id"] is not None
    talk.send("response.cancel", event_id="mine")
    assert talk.until("error")[-1]["error"]["code"] == "response_cancel_not_active"


def test_recordings_come_as_items_too_and_a_response_may_refer_to_them(talk: Session) -> None:
    parts = [{"type": "input_audio", "audio": sound(0.5)}, {"type": "input_text", "text": "and more"}]
    talk.send("conversation.item.create", item={"type": "message", "role": "user", "content": parts})
    item = talk.until("conversation.item.done")[-1]["item"]
    talk.ask("later")
    events = talk.respond(**TEXT, conversation="none", input=[{"type": "item_reference", "id": item["id"]}])
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "0.5 s at 24000 Hz\nand more" * 3
    talk.send("conversation.item.retrieve", item_id=item["id"])
    assert talk.receive()["item"]["content"][0] == {**parts[0], "transcript": "0.5 s at 24000 Hz"}
    for seconds in (0.0, 0.05):
        refused = {"type": "message", "role": "user", "content": [parts[1], {"type": "input_audio"}]}
        refused["content"][1]["audio"] = sound(seconds)
        error = talk.error("conversation.item.create", item=refused)
        assert (error["code"], error["param"]) == ("invalid_value", "item.content[1].audio")
    wrong = {"type": "message", "role": "assistant", "content": parts}
    assert talk.error("conversation.item.create", item=wrong)["param"] == "item.content[0].type"
    system = {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "Be brief."}]}
    talk.send("conversation.item.create", item=system)
    assert talk.until("conversation.item.done")[-1]["item"]["role"] == "system"


def test_the_input_of_a_response_is_bounded(start: Start) -> None:
    with start("--session-bytes", "2000") as server, session(server) as talk:
        item = talk.ask("x" * 1500)
        reference = {"type": "item_reference", "id": item["id"]}
        error = talk.error("response.create", response={**TEXT, "input": [reference] * 2})
        assert (error["code"], error["param"]) == ("duplicate_item", "response.input")
        more = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "é" * 300}]}
        error = talk.error("response.create", response={**TEXT, "input": [reference, more]})
        assert (error["code"], error["param"]) == ("input_too_large", "response.input")
        events = talk.respond(**TEXT, input=[reference], conversation="none")
        assert events[-1]["response"]["status"] == "completed"


def test_a_response_may_follow_a_cancelled_one_at_once(talk: Session) -> None:
    talk.ask("word " * 50)
    talk.send("response.create")
    talk.send("response.cancel")
    talk.send("response.create", response=TEXT)
    assert talk.until("response.done")[-1]["response"]["status"] == "cancelled"
    assert talk.until("response.done")[-1]["response"]["status"] == "completed"


def test_one_response_at_a_time(talk: Session) -> None:
    talk.ask("word " * 50)
    talk.send("response.create")
    talk.send("response.create", event_id="mine")
    error = talk.until("error")[-1]["error"]
    assert (error["code"], error["event_id"]) == ("conversation_already_has_active_response", "mine")
    talk.send("output_audio_buffer.clear")
    assert talk.until("output_audio_buffer.cleared")
    assert talk.error("response.cancel")["code"] == "response_cancel_not_active"


@pytest.mark.parametrize(
    ("type", "fields", "code", "param"),
    [
        ("nonsense", {}, "invalid_value", "type"),
        ("session.update", {}, "missing_required_parameter", "session"),
        ("session.update", {"session": {"voice": "x"}}, "unknown_parameter", "session.voice"),
        (
            "session.update",
            {"session": {"output_modalities": ["smell"]}},
            "invalid_value",
            "session.output_modalities[0]",
        ),
        ("session.update", {"session": {"model": "other"}}, "invalid_value", "session.model"),
        ("session.update", {"session": {"tracing": [1]}}, "invalid_value", "session.tracing"),
        ("session.update", {"session": {"tracing": {"metadata": {"a": "x" * 16_384}}}}, "invalid_value", None),
        ("session.update", {"session": {"audio": {"input": {"format": {"type": "audio/mp3"}}}}}, "invalid_value", None),
        ("session.update", {"session": {"tools": [{"type": "function", "name": "x"}]}}, "unsupported_parameter", None),
        ("input_audio_buffer.append", {"audio": "?"}, "invalid_base64", "audio"),
        ("input_audio_buffer.commit", {}, "input_audio_buffer_commit_empty", None),
        ("conversation.item.delete", {"item_id": "x"}, "item_not_found", "item_id"),
        ("conversation.item.truncate", {"item_id": "x", "content_index": 0, "audio_end_ms": 0}, "item_not_found", None),
        ("conversation.item.create", {"item": CALL}, "unsupported_parameter", "item.type"),
        ("response.cancel", {"response_id": "x"}, "response_cancel_not_active", None),
        ("response.create", {"response": {"input": [{"type": "item_reference", "id": "x"}]}}, "item_not_found", None),
        ("response.create", {"response": {"input": [RECORDING]}}, "unsupported_input", "response.input"),
    ],
)
def test_a_bad_event_is_an_error_that_names_it(
    talk: Session, type: str, fields: dict[str, Any], code: str, param: str | None
) -> None:
    error = talk.error(type, **fields)
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    if param is not None:
        assert error["param"] == param
    talk.ask("still there")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", '"x"', "[" * 100_000, '{"type": NaN}', "\ud800".encode("utf-8", "replace").decode()]
)
def test_what_is_no_event_is_an_error(talk: Session, text: str) -> None:
    talk.websocket.send(text)
    assert talk.receive()["error"]["type"] == "invalid_request_error"
    talk.ask("still there")


def test_the_place_of_a_mistake_deep_in_an_update(talk: Session) -> None:
    error = talk.error("session.update", session={"tools": [{"type": "function"}]})
    assert (error["param"], error["message"]) == (
        "session.tools[0].name",
        "missing required parameter 'session.tools[0].name'",
    )
    error = talk.error("session.update", session={"audio": {"output": {"speed": 9}}})
    assert error["param"] == "session.audio.output.speed"
    assert error["message"].startswith("session.audio.output.speed: ")


def test_null_is_no_value_where_a_value_is_optional(talk: Session) -> None:
    detection = {"type": "server_vad", "create_response": False, "interrupt_response": None, "idle_timeout_ms": None}
    update = {"type": "realtime", "audio": {"input": {"turn_detection": detection}, "output": {"voice": None}}}
    talk.send("session.update", session=update)
    assert (
        talk.until("session.updated")[-1]["session"]["audio"]["input"]["turn_detection"]["interrupt_response"] is True
    )
    talk.send("session.update", session={"audio": {"input": {"turn_detection": None}}})
    assert talk.until("session.updated")[-1]["session"]["audio"]["input"]["turn_detection"] is None
    part = {"type": "input_text", "text": "hello", "transcript": None}
    message = {"type": "message", "role": "user", "status": None, "object": None, "content": [part]}
    talk.send("conversation.item.create", item=message, previous_item_id=None)
    talk.until("conversation.item.done")
    done = talk.respond(**TEXT, instructions=None, max_output_tokens=None, tools=None, input=None)[-1]["response"]
    assert done["status"] == "completed"
    assert (
        "text" in talk.error("conversation.item.create", item={**message, "content": [{**part, "text": None}]})["param"]
    )


def test_the_assistant_may_begin(talk: Session) -> None:
    done = talk.respond(**TEXT)[-1]["response"]
    assert done["status"] == "completed", done["status_details"]
    [item] = done["output"]
    assert "Greet the user" in item["content"][0]["text"]


@pytest.mark.parametrize(
    "tracing",
    ["auto", {"workflow_name": "talk", "metadata": {"user": "1", "attempt": 1, "of": [{"a": None}]}, "group_id": "x"}],
)
def test_tracing_is_accepted_as_agents_send_it(talk: Session, tracing: Any) -> None:
    talk.send("session.update", session={"tracing": tracing})
    assert talk.receive()["session"]["tracing"] == tracing


def test_a_binary_frame_ends_the_session(talk: Session) -> None:
    talk.websocket.send(b"\0")
    assert closed_with(talk) == 1003


def test_sessions_are_refused_with_a_status(start: Start) -> None:
    with start("--max-sessions", "1", "--max-event-bytes", "10000", api_key="sesame") as server:
        url = f"ws://127.0.0.1:{server.port}/v1/realtime"

        def status(query: str = "", **options: Any) -> int:
            options = {"additional_headers": {"authorization": "Bearer sesame"}, **options}
            with pytest.raises(InvalidStatus) as caught, connect(url + query, **options):
                pass
            return int(caught.value.response.status_code)

        assert status(additional_headers={}) == 401
        for key in ("openai-insecure-api-key.open", "omni-actors-base64url-api-key.b3Blbg"):
            assert status(additional_headers={}, subprotocols=["realtime", key]) == 401
        assert status("?model=other") == 404
        assert status("?intent=transcription") == 400
        assert status("s") == 404
        plain = server.http.get("/v1/realtime")
        assert plain.status_code == 426
        assert (plain.headers["upgrade"], plain.headers["connection"]) == ("websocket", "Upgrade")
        browser: Any = {"subprotocols": ["realtime", "openai-insecure-api-key.sesame"], "origin": "https://x.example"}
        with session(server, **browser) as talk:
            assert talk.websocket.subprotocol == "realtime"
            assert status() == 429
            assert server.metric("omni_realtime_sessions") == 1
        server.wait_metric("omni_realtime_sessions", 0)
        encoded = "omni-actors-base64url-api-key.c2VzYW1l"
        with session(server, subprotocols=["realtime", encoded], origin="https://x.example") as talk:
            assert talk.websocket.subprotocol == "realtime"
        server.wait_metric("omni_realtime_sessions", 0)
        with session(server, additional_headers={"authorization": "Bearer sesame"}) as talk:
            talk.websocket.send("x" * 10_001)
            assert closed_with(talk) == 1009


@pytest.mark.parametrize("flags", [["--max-sessions", "4"], ["--max-sessions", "3", "--max-sessions-per-address", "2"]])
def test_one_address_cannot_take_all_sessions(start: Start, flags: list[str]) -> None:
    """By default it can take half of them."""
    with start(*flags, config="echo") as server, ExitStack() as sessions:

        def refusal() -> tuple[int, str]:
            with pytest.raises(InvalidStatus) as caught, connect(f"ws://127.0.0.1:{server.port}/v1/realtime"):
                pass
            response = caught.value.response
            return response.status_code, json.loads(response.body)["error"]["message"]

        first = sessions.enter_context(session(server))
        sessions.enter_context(session(server))
        assert refusal() == (429, "this address has 2 sessions, which is the limit for one address")
        sessions.enter_context(session(server, source_address=("127.0.0.2", 0)))
        first.websocket.close()
        server.wait_metric("omni_realtime_sessions", 2)
        sessions.enter_context(session(server))
        assert refusal()[0] == 429


def test_one_address_has_a_session_where_there_is_one(start: Start) -> None:
    with start("--max-sessions", "1", config="echo") as server, session(server):
        pass


def test_a_session_ends_when_its_time_is_over(start: Start) -> None:
    with start("--session-s", "0.5", config="echo") as server, session(server) as talk:
        assert talk.receive()["error"]["code"] == "session_expired"
        assert closed_with(talk) == 1000


@pytest.mark.slow
def test_a_dead_stage_fails_a_response_and_a_drain_ends_sessions_with_1001(start: Start) -> None:
    """A response in progress may end during the drain."""
    with start() as server, session(server) as idle, session(server) as busy:
        deadly = idle.ask("deadly")
        failed = idle.respond()[-1]["response"]
        assert failed["status"] == "failed"
        assert failed["status_details"]["error"]["code"] in ("stage_crashed", "quarantined")
        idle.send("conversation.item.delete", item_id=deadly["id"])
        assert idle.receive()["type"] == "conversation.item.deleted"
        idle.ask("hello")
        assert idle.respond()[-1]["response"]["status"] == "completed"  # the stage was started again
        busy.ask("word " * 10)
        busy.send("response.create")
        busy.until("response.output_audio.delta")
        server.signal(signal.SIGTERM)
        assert busy.until("response.done")[-1]["response"]["status"] == "completed"
        for talk in (idle, busy):
            assert closed_with(talk) == 1001
        assert server.wait_end() == 0


def test_a_drain_fails_an_answer_whose_sound_alone_is_left(start: Start) -> None:
    with start("--drain-s", "0.5") as server, session(server) as talk:
        talk.ask("word " * 100)
        talk.send("response.create")
        talk.until("response.output_audio.delta")
        server.wait_metric("omni_requests_in_flight", 0)  # all is computed, and leaves at the pace of speech
        server.signal(signal.SIGTERM)
        response = talk.until("response.done")[-1]["response"]
        assert (response["status"], response["status_details"]["error"]["code"]) == ("failed", "aborted")
        assert closed_with(talk) == 1001
        assert server.wait_end() == 0


def test_a_pipeline_without_speech_answers_in_text(start: Start) -> None:
    """The server has no key, so it refuses the pages of other origins."""
    with start(config="echo") as server, session(server) as talk:
        with (
            pytest.raises(InvalidStatus) as caught,
            connect(f"ws://127.0.0.1:{server.port}/v1/realtime", origin="https://x.example"),
        ):
            pass
        assert caught.value.response.status_code == 403
        assert talk.error("input_audio_buffer.append", audio="AAAA")["code"] == "unsupported_input"
        talk.ask("hello")
        events = talk.respond(**TEXT)
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "hello"
