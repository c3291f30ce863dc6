"""The routes of an operator: only with --enable-admin, and only with the key."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from omni_actors.serve.command import serve_command
from omni_actors.serve.routes.admin import OPERATIONS
from tests.support.frozen import freeze
from tests.support.http_server import Server, Start

CONTROLLED = """\
name: controlled
stages:
  mind: {engine: "tests.support.controllable_engine:ControllableEcho", accepts: [messages], emits: text}
  plain: {engine: "tests.support.served_engines:Speaker", accepts: [script], emits: audio}
"""

BRITTLE = """\
name: brittle
stages:
  mind:
    engine: "tests.support.controllable_engine:BrittleEcho"
    options: {{needs: {}}}
    accepts: [messages]
    emits: text
"""


@pytest.fixture(scope="module")
def controlled(start: Start) -> Iterator[Server]:
    with start("--enable-admin", config=CONTROLLED, api_key="sesame") as server:
        server.http.headers["authorization"] = "Bearer sesame"
        yield server


def call(server: Server, **body: Any) -> Any:
    return server.http.post("/call", json=body)


def test_without_the_flag_there_are_no_such_routes(studio: Server) -> None:
    for path, operation in OPERATIONS.items():
        answer = studio.http.request(operation.http_method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")


def test_the_flag_needs_a_key() -> None:
    result = CliRunner().invoke(serve_command, ["echo", "--enable-admin"])
    assert (result.exit_code, "--api-key" in result.stderr) == (2, True)


@pytest.mark.parametrize("path", OPERATIONS)
def test_each_route_needs_the_key(controlled: Server, path: str) -> None:
    operation = OPERATIONS[path]
    answer = controlled.http.request(operation.http_method, path, headers={"authorization": "Bearer other"})
    assert answer.status_code == 401


def test_a_call_answers_for_every_replica_and_names_stages_without_the_capability(controlled: Server) -> None:
    note = {"name": "a", "text": "b"}
    assert call(controlled, capability="note", arguments=note, stages=["mind"]).json() == {
        "result": {"mind": [{"value": "b"}]}
    }
    both = call(controlled, capability="active").json()["result"]
    assert both["mind"] == [{"value": []}]
    [refused] = both["plain"]
    assert refused["error"]["code"] == "unsupported"
    assert refused["error"]["capability"] == "active"


def test_a_capability_that_no_stage_has_is_501_with_the_reason(controlled: Server) -> None:
    answer = call(controlled, capability="sleep", stages=["mind"])
    error = answer.json()["error"]
    assert answer.status_code == 501
    assert (error["stage"], error["capability"], error["why"]) == ("mind", "sleep", "there is nothing to offload")


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/call", {}, 400, "capability"),
        ("/call", {"capability": "note", "stages": ["other"]}, 400, "stages"),
        ("/call", {"capability": "note", "arguments": {"name": "a", "text": ""}, "stages": ["mind"]}, 400, "text"),
        ("/call", {"capability": "note", "colour": 1}, 400, "colour"),
        ("/pause", {"mode": "maybe"}, 400, "mode"),
        ("/resume", {"mode": "wait"}, 400, "mode"),
        ("/scale", {"stage": "other", "replicas": 1}, 400, "stage"),
        ("/scale", {"stage": "mind", "replicas": 65}, 400, "replicas"),
        ("/scale", {"stage": "mind"}, 400, "replicas"),
        ("/v1/load_lora_adapter", {"lora_name": "x"}, 400, "lora_path"),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"}, 400, "lora_path"),
        ("/v1/load_lora_adapter", {"lora_name": "", "lora_path": "/nowhere"}, 400, "lora_name"),
        ("/v1/unload_lora_adapter", {"lora_name": "x"}, 400, "lora_name"),
    ],
)
def test_wrong_calls(controlled: Server, path: str, body: dict[str, Any], status: int, param: str) -> None:
    answer = controlled.http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_generation_is_paused_and_resumed(controlled: Server) -> None:
    """The arguments may be in the query, as vLLM's are, and the body empty."""
    assert controlled.http.get("/is_paused").json() == {"result": False}
    assert controlled.http.post("/pause?mode=wait").json() == {"result": {}}
    assert controlled.http.get("/is_paused").json() == {"result": True}
    assert controlled.http.post("/resume").json() == {"result": None}
    assert controlled.http.get("/is_paused").json() == {"result": False}


def test_a_list_in_the_query_has_its_name_before_each_value(controlled: Server) -> None:
    answer = controlled.http.post("/call?capability=active&stages=plain&stages=mind")
    assert list(answer.json()["result"]) == ["mind", "plain"]
    assert controlled.http.post("/call?capability=active&stages=mind").json()["result"].keys() == {"mind"}


def test_a_worker_that_does_not_answer_is_an_error_with_its_own_code(controlled: Server) -> None:
    worker = controlled.pid_of("mind")
    freeze(worker)
    try:
        answer = call(controlled, capability="worker_status", stages=["mind"], timeout_s=0.2)
    finally:
        os.kill(worker, signal.SIGCONT)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (504, "call_timed_out")
    assert "took longer than 0.2 s" in error["message"]


def test_a_stage_sleeps_and_wakes(start: Start) -> None:
    with start("--enable-admin", config=CONTROLLED, api_key="sesame") as server:
        slept = server.http.post("/sleep?level=2", json={"stages": ["plain"]}).json()["result"]["plain"]
        assert slept[0]["value"]["before"]["rss_bytes"] > 0
        assert server.http.get("/is_sleeping").json() == {"result": True}
        assert server.http.post("/wake_up").status_code == 200
        assert server.http.get("/is_sleeping").json() == {"result": False}


def test_what_has_its_effect_without_the_workers_of_a_sleeping_stage_succeeds(start: Start) -> None:
    with start("--enable-admin", config=CONTROLLED, api_key="sesame") as server:
        assert server.http.post("/sleep?level=2", json={"stages": ["plain"]}).status_code == 200
        for path in ("/sleep?level=2&stages=plain", "/pause?mode=keep", "/start_profile"):
            answer = server.http.post(path)
            assert answer.status_code == 200, answer.text
        [lost] = server.http.post("/pause?mode=keep").json()["result"]["plain"]
        assert lost["error"]["code"] == "worker_lost"
        assert lost["error"]["stage"] == "plain"
        assert "it has no worker" in lost["error"]["why"]
        assert server.http.get("/is_paused").json() == {"result": True}
        answer = server.http.post("/call", json={"capability": "worker_status"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_lost")
        stopped = server.http.post("/stop_profile")
        assert stopped.status_code == 200


def test_a_stage_is_scaled(controlled: Server) -> None:
    scaled = controlled.http.post("/scale", json={"stage": "mind", "replicas": 2}).json()["result"]
    assert (scaled["stage"], scaled["before"], scaled["after"]) == ("mind", 1, 2)
    assert 'omni_stage_replicas_ready{stage="mind"} 2.0' in controlled.http.get("/metrics").text
    assert controlled.http.post("/scale?stage=mind&replicas=1&drain_s=1").json()["result"]["after"] == 1


def test_a_replica_that_cannot_load_is_an_error_with_its_own_code(start: Start, tmp_path: Path) -> None:
    needed = tmp_path / "weights"
    needed.touch()
    with start("--enable-admin", config=BRITTLE.format(needed), api_key="sesame") as server:
        server.http.headers["authorization"] = "Bearer sesame"
        needed.unlink()
        answer = server.http.post("/scale", json={"stage": "mind", "replicas": 2})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stage_failed")
        assert 'omni_stage_replicas_ready{stage="mind"} 1.0' in server.http.get("/metrics").text


@pytest.mark.parametrize(("session", "status"), [("s" * 256, 200), ("s" * 257, 400)])
def test_a_header_names_the_session(controlled: Server, session: str, status: int) -> None:
    question = {"model": "controlled", "messages": [{"role": "user", "content": "hi"}]}
    headers = {"x-session-id": session}
    answer = controlled.http.post("/v1/chat/completions", json=question, headers=headers)
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["param"] == "X-Session-ID"
    prompt = {"model": "controlled", "prompt": "hi"}
    assert controlled.http.post("/v1/completions", json=prompt, headers=headers).status_code == status


def test_a_call_that_does_all_or_nothing_fails_if_one_stage_cannot(controlled: Server) -> None:
    answer = controlled.http.post("/sleep")
    assert (answer.status_code, answer.json()["error"]["capability"]) == (501, "sleep")
    assert controlled.http.get("/is_sleeping").json() == {"result": False}


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"])
def test_a_cache_that_is_not_there_is_not_reset(controlled: Server, path: str) -> None:
    answer = controlled.http.post(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (501, "unsupported")


def test_requests_are_aborted_by_the_ids_of_their_responses(controlled: Server) -> None:
    found = controlled.http.post("/abort_requests", json={"request_ids": ["chatcmpl-unknown"]}).json()
    assert found == {"result": {"requests": {}, "replies": {}}}


def test_a_response_is_aborted_by_its_id_though_its_request_has_another_name(start: Start) -> None:
    slow = ("-s", "stages.first.options.fan_out=100000", "-s", "stages.first.options.step_s=0.01")
    with start("--enable-admin", *slow, config="echo", api_key="sesame") as server, server.openai() as client:
        server.http.headers["authorization"] = "Bearer sesame"
        with client.responses.create(model="echo", input="hello", stream=True) as stream:
            id = next(iter(stream)).response.id
            [name] = server.http.get("/v1/state").json()["requests"]
            found = server.http.post("/abort_requests", json={"request_ids": [id]}).json()
            assert id.startswith(name)
            assert list(found["result"]["requests"]) == [name]
            assert list(stream)[-1].type == "response.failed"


def test_a_list_of_adapters(controlled: Server) -> None:
    assert controlled.http.get("/list_loras").json() == {"result": []}


def test_a_profile_is_the_response(controlled: Server) -> None:
    """Requests are recorded though no engine here computes with torch."""
    started = controlled.http.post("/start_profile", json={"stages": ["mind"]}).json()["result"]
    assert started["mind"][0]["error"]["code"] == "unsupported"
    again = controlled.http.post("/start_profile")
    assert (again.status_code, again.json()["error"]["code"]) == (400, "profile_runs")
    question = {"model": "controlled", "messages": [{"role": "user", "content": "hi"}]}
    identifier = controlled.http.post("/v1/chat/completions", json=question).json()["id"]
    answer = controlled.http.post("/stop_profile")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    tracks = {each["args"]["name"] for each in answer.json()["traceEvents"] if each["name"] == "thread_name"}
    assert {identifier, f"{identifier}: stage mind"} <= tracks
    stopped = controlled.http.post("/stop_profile")
    assert (stopped.status_code, stopped.json()["error"]["code"]) == (400, "no_profile")


def test_a_client_names_no_file_for_a_profile(controlled: Server, tmp_path: Path) -> None:
    answer = controlled.http.post("/stop_profile", json={"path": str(tmp_path / "profile.json")})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "path")
    assert not list(tmp_path.iterdir())


def test_openapi_has_the_routes_only_where_they_are(controlled: Server, studio: Server) -> None:
    ours, theirs = (server.http.get("/openapi.json").json()["paths"] for server in (controlled, studio))
    assert set(ours) - set(theirs) == set(OPERATIONS)
    assert ours["/pause"]["post"]["security"] == [{"key": []}]
    assert "Stop generating" in ours["/pause"]["post"]["summary"]
