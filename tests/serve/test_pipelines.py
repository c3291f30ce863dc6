"""One server with several pipelines: requests choose one by its name, and none disturbs another."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import trio
from click.testing import CliRunner

from omni_actors.errors import ConfigError
from omni_actors.orchestrator.unread import ROOM_GRACE_S
from omni_actors.serve.command import load_pipelines, serve_command
from omni_actors.serve.server import serve
from omni_actors.serve.settings import ServerSettings
from tests.support.http_server import WATCHDOG_S, Server, Start, stalled, until

HELLO: Any = [{"role": "user", "content": "hello"}]
MIND = """\
name: mind
stages:
  think: {engine: echo, accepts: [messages], emits: text}
"""
EYE = """\
name: eye
stages:
  see: {engine: "tests.support.served_engines:Eye", accepts: [image, messages], emits: text}
"""
BROKEN = """\
name: broken
stages: {one: {engine: "tests.support.served_engines:broken", accepts: [script], emits: text}}
"""


@pytest.fixture(scope="module")
def both(start: Start) -> Iterator[Server]:
    """Two pipelines. The second one admits one request at a time, which takes a quarter of an hour."""
    slow = ("-s", "twin:limits.max_requests=1", "-s", "twin:stages.first.options={fan_out: 100000, step_s: 0.01}")
    with start("twin=echo", *slow, "--enable-admin", config=MIND, api_key="sesame") as server:
        server.wait(lambda: server.status() == "ready", "both pipelines to load")
        yield server


def ask(server: Server, model: str, **fields: Any) -> Any:
    return server.http.post("/v1/chat/completions", json={"model": model, "messages": HELLO, **fields})


def test_a_body_has_to_name_its_model(both: Server) -> None:
    schemas = both.http.get("/openapi.json").json()["components"]["schemas"]
    assert "model" in schemas["ChatRequest"]["required"]


def test_a_request_goes_to_the_pipeline_that_it_names(both: Server) -> None:
    with both.openai() as client:
        assert {model.id for model in client.models.list()} == {"mind", "twin"}
        assert client.models.retrieve("twin").id == "twin"
        answer = client.chat.completions.create(model="mind", messages=HELLO)
        assert answer.choices[0].message.content == "hello"
        stream = client.chat.completions.create(model="twin", messages=HELLO, stream=True)
        assert next(iter(stream)).model == "twin"
        stream.close()
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="echo", messages=HELLO)
        assert caught.value.code == "model_not_found"
        assert "'mind'" in caught.value.message
        assert "'twin'" in caught.value.message


def test_the_first_line_names_the_pipelines_and_the_page(both: Server) -> None:
    first = both.stdout.splitlines()[0]
    assert first == f"listening on {both.url}; loading mind, twin; the page is at {both.url}/"


def test_a_conversation_that_another_pipeline_cannot_continue(start: Start, tmp_path: Path) -> None:
    """It lacks what the response's conversation has, and no field of the request has that."""
    (config := tmp_path / "mind.yaml").write_text(MIND)
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    with start(str(config), config=EYE) as server:
        server.wait(lambda: server.status() == "ready", "both pipelines to load")
        body = {"model": "eye", "input": [{"role": "user", "content": [picture]}]}
        seen = server.http.post("/v1/responses", json=body).json()
        body = {"model": "mind", "input": "and now?", "previous_response_id": seen["id"]}
        error = server.http.post("/v1/responses", json=body).json()["error"]
    assert error["param"] == "previous_response_id"
    assert error["message"] == "previous_response_id: 'mind' does not accept image; accepted: 'messages'"


def test_a_full_pipeline_refuses_its_own_requests_only(both: Server) -> None:
    with both.openai() as client:
        both.wait_metric('omni_requests_in_flight{pipeline="twin"}', 0)
        stream = client.chat.completions.create(model="twin", messages=HELLO, stream=True)
        next(iter(stream))
        assert ask(both, "twin").status_code == 429
        assert ask(both, "mind").status_code == 200
        assert both.metric('omni_requests_in_flight{pipeline="twin"}') == 1
        assert both.metric('omni_requests_in_flight{pipeline="mind"}') == 0
        stream.close()
        both.wait_metric('omni_requests_in_flight{pipeline="twin"}', 0)
    for _ in range(3):
        assert ask(both, "mind").status_code == 200, "its places were given back"


@pytest.mark.slow
def test_a_request_ends_no_slow_reader_of_another_pipeline(start: Start, tmp_path: Path) -> None:
    """The pipeline with the slow reader is full, and comes first."""
    (tmp_path / "mind.yaml").write_text(MIND)
    limits = ("-s", "limits.window_bytes=200000", "-s", "limits.max_requests=1", "-s", "limits.read_bytes_s=0.001")
    with start(str(tmp_path / "mind.yaml"), *limits) as server, ExitStack() as stack:
        server.wait(lambda: server.status() == "ready", "both pipelines to load")
        stack.enter_context(stalled(server))
        server.wait_metric('omni_requests_paused{pipeline="studio"}', 1)
        time.sleep(ROOM_GRACE_S)  # from now on, a request for the same pipeline may end it
        assert ask(server, "mind").status_code == 200
        assert server.metric('omni_requests_in_flight{pipeline="studio"}') == 1
        server.wait(lambda: ask(server, "studio").status_code == 200, "a place to be made for its own request")
        assert server.metric('omni_requests_total{outcome="SlowConsumer",pipeline="studio"}') == 1


def test_health_has_each_pipeline(both: Server) -> None:
    body = both.http.get("/health").json()
    assert body["status"] == "ready"
    assert {name: (each["status"], each["model"]) for name, each in body["pipelines"].items()} == {
        "mind": ("ready", "mind"),
        "twin": ("ready", "twin"),
    }
    assert both.http.get("/health", params={"pipeline": "twin"}).json() == body["pipelines"]["twin"]
    assert both.http.get("/health", params={"pipeline": "triplet"}).status_code == 404


def test_every_sample_of_a_pipeline_has_its_label(both: Server) -> None:
    ask(both, "mind")
    lines = [line for line in both.http.get("/metrics").text.splitlines() if not line.startswith("#")]
    assert all('pipeline="' in line for line in lines if not line.startswith(("omni_http_", "omni_realtime_sessions")))
    assert both.metric('omni_requests_total{outcome="done",pipeline="mind"}') >= 1
    helps = [line for line in both.http.get("/metrics").text.splitlines() if line.startswith("# HELP ")]
    assert len(helps) == len(set(helps)), "each family is described once"


def test_an_operator_names_the_pipeline(both: Server) -> None:
    refused = both.http.post("/pause", json={"mode": "keep"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "pipeline")
    assert both.http.post("/pause", json={"mode": "keep", "pipeline": "triplet"}).status_code == 404
    assert both.http.post("/pause", json={"mode": "keep", "pipeline": "twin"}).status_code == 200
    paused = [both.http.get("/is_paused", params={"pipeline": name}).json()["result"] for name in ("mind", "twin")]
    assert paused == [False, True]
    assert both.http.post("/resume", params={"pipeline": "twin"}).status_code == 200


def test_a_call_without_a_model_is_refused(both: Server) -> None:
    for path, body in (("/tokenize", {"prompt": "hello"}), ("/v1/chat/completions", {"messages": HELLO})):
        refused = both.http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        assert "'mind', 'twin'" in refused.json()["error"]["message"]
    assert both.http.post("/tokenize", json={"model": "mind", "prompt": "hello"}).status_code == 501


def test_the_live_state_is_that_of_one_pipeline(both: Server) -> None:
    stages = [set(both.http.get("/v1/state", params={"pipeline": name}).json()["stages"]) for name in ("mind", "twin")]
    assert stages == [{"think"}, {"first", "second"}]


def test_a_death_in_one_pipeline_is_none_in_the_other(both: Server, fixture_processes: set[int]) -> None:
    def replica(name: str) -> dict[str, Any]:
        found: dict[str, Any] = both.http.get("/health", params={"pipeline": name}).json()["stages"]
        return next(iter(found.values()))[0]

    before, died = replica("mind"), replica("twin")["pid"]
    os.kill(died, signal.SIGKILL)
    until(lambda: replica("twin")["pid"] not in (died, None), "the worker to be restarted")
    fixture_processes.add(replica("twin")["pid"])
    assert replica("mind") == before
    both.wait(lambda: both.status() == "ready", "both pipelines to be ready")


def test_a_pipeline_that_cannot_load_does_not_end_the_others(start: Start, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text(BROKEN)
    with start(str(broken), config=MIND) as server:
        server.wait(lambda: "the pipeline 'broken' cannot load" in server.stderr, "the failure to be logged")
        server.wait(lambda: server.status() == "degraded", "the other pipeline to be ready")
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/health", params={"pipeline": "broken"}).status_code == 503
        assert ask(server, "mind").status_code == 200
        refused = server.http.post("/v1/audio/speech", json={"model": "broken", "input": "hello"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
        assert server.ends_by(signal.SIGTERM)[0] == 0


def test_a_pipeline_that_could_not_load_is_tried_again(start: Start, tmp_path: Path) -> None:
    weights, config = tmp_path / "weights", tmp_path / "late.yaml"
    engine = f'engine: "tests.support.served_engines:waiting_for_weights", options: {{weights: {weights}}}'
    config.write_text(
        f"name: late\nstages: {{one: {{{engine}, accepts: [messages], emits: text, restart: {{retry_s: 0.2}}}}}}"
    )
    with start(str(config), config=MIND) as server:
        server.wait(lambda: "the pipeline 'late' cannot load" in server.stderr, "the failure to be logged")
        assert ask(server, "late").status_code == 503
        server.wait(lambda: "stage 'one' (replica 0, generation 2) died" in server.stderr, "the next try to be logged")
        weights.touch()
        server.wait(lambda: server.status() == "ready", "both pipelines to load")
        assert ask(server, "late").status_code == 200


async def test_a_server_has_started_when_each_pipeline_has_loaded_or_failed(tmp_path: Path) -> None:
    """In either order: the broken one is the first or the last to be known."""
    documents = []
    for name, document in (("mind", MIND), ("broken", BROKEN)):
        documents.append(tmp_path / f"{name}.yaml")
        documents[-1].write_text(document)
    pipelines = load_pipelines([str(each) for each in documents], [])
    run = partial(serve, pipelines, ServerSettings(port=0), announce=None, handles_signals=False)
    with trio.fail_after(WATCHDOG_S):
        async with trio.open_nursery() as nursery:
            url = await nursery.start(run)
            assert url.startswith("http://127.0.0.1:")
            nursery.cancel_scope.cancel()


def test_a_server_of_which_no_pipeline_can_load_ends(start: Start, tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text(BROKEN)
    with start(f"again={broken}", config=BROKEN, ready=False) as server:
        assert server.wait_end() == 1
        assert "the weights of this model are not there" in server.stderr


def test_names_and_overrides_on_the_command_line() -> None:
    pipelines = load_pipelines(["echo", "twin=echo"], ["twin:stages.first.threads=2", "limits.max_requests=3"])
    assert [(each.name, each.stages["first"].threads) for each in pipelines] == [("echo", 0), ("twin", 2)]
    assert [each.limits.max_requests for each in pipelines] == [3, 3]
    [of_a_hub] = load_pipelines(["Qwen/Qwen3-Omni-30B-A3B-Instruct=echo"], ["stages.first.threads=2"])
    assert (of_a_hub.name, of_a_hub.stages["first"].threads) == ("Qwen/Qwen3-Omni-30B-A3B-Instruct", 2)
    with pytest.raises(ConfigError, match="NAME=PIPELINE"):
        load_pipelines(["echo", "echo"], [])
    with pytest.raises(ConfigError, match="stages\\.fist"):
        load_pipelines(["echo", "twin=echo"], ["echo:stages.fist.threads=2"])


async def test_overrides_for_several_pipelines_are_refused() -> None:
    with pytest.raises(ValueError, match=r"overrides are for a single pipeline.*config\.load"):
        await serve(load_pipelines(["echo"], []), overrides={"stages.first.threads": 2})


def test_two_pipelines_of_one_name_are_a_bad_configuration() -> None:
    result = CliRunner().invoke(serve_command, ["echo", "echo"])
    assert result.exit_code == 2
    assert "NAME=PIPELINE" in result.stderr


@pytest.mark.filterwarnings(r"ignore:connect\(\) must be used as a context manager:DeprecationWarning")
def test_a_realtime_session_is_that_of_the_pipeline_that_it_names(both: Server) -> None:
    with both.openai() as client:
        with client.realtime.connect(model="mind") as connection:
            assert connection.recv().type == "session.created"
        with pytest.raises(Exception, match="404"), client.realtime.connect(model="triplet"):
            pass
