"""Routes refuse a model that cannot do what they do, and name the routes that serve it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from bench.turns import SENTENCES, say
from tests.support.http_server import Server, Start
from tests.support.realtime import pcm, session, silence

PIPELINES = {
    "hearing": "{engine: echo, accepts: [audio, messages], emits: text}",  # the shape of an omni model without speech
    "speaker": "{engine: echo, accepts: [script], emits: audio}",
    "writer": "{engine: echo, accepts: [audio], emits: transcript}",
    "painter": '{engine: "tests.support.painting_engine:PaintingEngine", accepts: [messages], emits: image}',
}
CHAT, SPEECH, PICTURES = "/v1/chat/completions", "/v1/audio/speech", "/v1/images/generations"
TRANSCRIPTS, RESPONSES, COMPLETIONS = "/v1/audio/transcriptions", "/v1/responses", "/v1/completions"
TRANSCRIBING: dict[str, Any] = {"turn_detection": None, "transcription": {"model": "any"}}
FORMS = (TRANSCRIPTS, "/v1/audio/translations")
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    COMPLETIONS: {"prompt": "hello"},
    RESPONSES: {"input": "hello"},
    SPEECH: {"input": "hello", "voice": "any"},
    PICTURES: {"prompt": "hello"},
    "/v1/images/edits": {"prompt": "hello", "images": [{"image_url": "no picture"}]},
}


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("pipelines")
    for name, stage in PIPELINES.items():
        (folder / f"{name}.yaml").write_text(f"name: {name}\nstages:\n  only: {stage}\n")
    first, *others = (str(folder / f"{name}.yaml") for name in PIPELINES)
    with start(*others, config=first) as server:
        server.wait(lambda: server.status() == "ready", "the pipelines to load")
        yield server
        assert server.stderr == ""


@pytest.mark.parametrize(
    ("path", "model", "words"),
    [
        (CHAT, "speaker", f"does not chat; it serves {SPEECH}"),
        (CHAT, "writer", f"does not chat; it serves {TRANSCRIPTS}"),
        (COMPLETIONS, "speaker", f"does not answer in text; it serves {SPEECH}"),
        (COMPLETIONS, "painter", f"does not answer in text; it serves {CHAT}, {PICTURES}"),
        (RESPONSES, "writer", f"does not answer in text; it serves {TRANSCRIPTS}"),
        (RESPONSES, "painter", f"does not answer in text; it serves {CHAT}, {PICTURES}"),
        (SPEECH, "hearing", f"does not read texts aloud; it serves {CHAT}"),
        (TRANSCRIPTS, "hearing", f"writes no transcripts; it serves {CHAT}"),
        (TRANSCRIPTS, "speaker", f"writes no transcripts; it serves {SPEECH}"),
        ("/v1/audio/translations", "hearing", f"writes no transcripts; it serves {CHAT}"),
        (PICTURES, "hearing", f"makes no pictures; it serves {CHAT}"),
        ("/v1/images/edits", "hearing", f"edits no pictures; it serves {CHAT}"),
        ("/v1/images/edits", "painter", f"edits no pictures; it serves {CHAT}, {PICTURES}"),
    ],
)
def test_a_model_that_cannot_do_what_a_route_does(server: Server, path: str, model: str, words: str) -> None:
    """The files are none: the model is the first that is wrong."""
    if path in FORMS:
        answer = server.http.post(path, data={"model": model}, files={"file": ("a.wav", b"no sound")})
    else:
        answer = server.http.post(path, json={"model": model, **BODIES[path]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "model", "unsupported_modality")
    assert error["message"] == f"model: '{model}' {words}"


def test_a_realtime_session_that_only_transcribes(server: Server) -> None:
    with session(server, query="?model=writer") as talk:
        talk.send("session.update", session={"type": "realtime", "audio": {"input": TRANSCRIBING}})
        talk.until("session.updated")
        talk.hear(silence(0.2))
        talk.send("input_audio_buffer.commit")
        talk.until("conversation.item.input_audio_transcription.completed")
        for conversation in ("auto", "none"):
            error = talk.error("response.create", response={"conversation": conversation})
            assert (error["code"], error["message"]) == (
                "unsupported_modality",
                "'writer' only transcribes, so there are no responses",
            )


@pytest.mark.voice
def test_a_spoken_turn_where_the_model_only_transcribes_gets_no_response(server: Server) -> None:
    with session(server, query="?model=writer") as talk:  # it finds the turns as every session does
        talk.send("session.update", session={"audio": {"input": {"transcription": {"model": "any"}}}})
        assert talk.until("session.updated")[-1]["session"]["audio"]["input"]["turn_detection"]["create_response"]
        for _ in range(2):
            talk.hear(silence(1) + pcm(say(SENTENCES[0])) + silence(1))
            types = [event["type"] for event in talk.until("conversation.item.input_audio_transcription.completed")]
            assert not {"response.created", "error"} & set(types)


@pytest.mark.parametrize(("model", "routes"), [("painter", f"{CHAT}, {PICTURES}"), ("speaker", SPEECH)])
def test_a_realtime_session_that_could_answer_nothing(server: Server, model: str, routes: str) -> None:
    url = f"ws://127.0.0.1:{server.port}/v1/realtime?model={model}"
    with pytest.raises(InvalidStatus) as caught, connect(url):
        pass
    response = caught.value.response
    error = json.loads(response.body)["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "model", "unsupported_modality")
    assert error["message"] == f"model: '{model}' does not answer in text; it serves {routes}"
