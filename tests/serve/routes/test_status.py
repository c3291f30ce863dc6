"""The routes that describe the server."""

from __future__ import annotations

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator, validate

import omni_actors
from omni_actors.config import load
from omni_actors.serve.app import CALL_ROUTES, MODEL_ROUTES, RESPONSE_ROUTES, STATUS_ROUTES
from omni_actors.serve.routes.status import _context, overall_status
from omni_actors.system import Health, ReplicaHealth
from tests.support.http_server import Server


def test_ping_and_version(studio: Server) -> None:
    ping = studio.http.get("/ping")
    assert (ping.status_code, ping.content) == (200, b"")
    assert studio.http.get("/version").json() == {"version": omni_actors.__version__}


def test_openapi_describes_every_route_and_its_body(studio: Server) -> None:
    found = studio.http.get("/openapi.json").json()
    assert set(found["paths"]) == {
        *MODEL_ROUTES,
        *CALL_ROUTES,
        *STATUS_ROUTES,
        *(path for _, path, _ in RESPONSE_ROUTES),
    }
    validate(found, cls=OpenAPIV31SpecValidator)
    ids = [operation["operationId"] for path in found["paths"].values() for operation in path.values()]
    assert len(set(ids)) == len(ids)
    files = {}
    for path in MODEL_ROUTES:
        for kind, content in found["paths"][path]["post"]["requestBody"]["content"].items():
            fields = content["schema"]
            if kind == "multipart/form-data":
                fields, files[path] = fields["allOf"]
            name = fields["$ref"].removeprefix("#/components/schemas/")
            schema = found["components"]["schemas"][name]
            assert "model" in schema["properties"]
            assert "model" not in schema.get("required", ()), "a server of one pipeline needs none"
    assert {path: schema["required"] for path, schema in files.items()} == {
        "/v1/audio/transcriptions": ["file"],
        "/v1/audio/translations": ["file"],
        "/v1/images/edits": ["image"],
    }
    assert "application/json" in found["paths"]["/v1/images/edits"]["post"]["requestBody"]["content"]
    speech = found["components"]["schemas"]["SpeechRequest"]["properties"]
    assert speech["response_format"]["default"] == "mp3"


def test_a_model_says_how_many_tokens_it_has_if_its_pipeline_does(studio: Server, writer: Server) -> None:
    assert studio.http.get("/v1/models").json()["data"][0]["max_model_len"] is None
    with writer.openai() as client:
        assert client.models.retrieve("writer").model_dump()["max_model_len"] == 512
    for length, expected in ((4096, 4096), ("8k", None)):
        pipeline = load("qwen3_omni_vllm", {"stages.thinker.options.engine_args.max_model_len": length})
        assert _context(pipeline) == expected


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ([["ready"], ["ready", "failed"]], "ready"),
        ([["ready"], ["failed", "loading"]], "loading"),
        ([["restarting", "failed"], ["loading"]], "restarting"),
        ([["failed", "failed"], ["ready"]], "failed"),
    ],
)
def test_the_status_is_that_of_the_worst_stage_and_a_stage_is_as_good_as_its_best_replica(
    stages: list[list[str]], expected: str
) -> None:
    now = Health(
        ready=expected == "ready",
        errored=False,
        stages={str(i): [in_state(state) for state in stage] for i, stage in enumerate(stages)},
        error=None,
    )
    assert overall_status(now) == expected


def in_state(state: str) -> ReplicaHealth:
    return ReplicaHealth(
        replica=0,
        state=state,
        standby=False,
        note="",
        generation=1,
        restarts=0,
        pid=None,
        load_s=None,
        last_exit=None,
        retry_in_s=None,
        history=[],
    )
