"""The routes that describe the server."""

from __future__ import annotations

import omni_actors
from omni_actors.serve.app import MODEL_ROUTES, STATUS_ROUTES
from tests.support.http_server import Server


def test_ping_and_version(studio: Server) -> None:
    ping = studio.http.get("/ping")
    assert (ping.status_code, ping.content) == (200, b"")
    assert studio.http.get("/version").json() == {"version": omni_actors.__version__}


def test_openapi_describes_every_route_and_its_body(studio: Server) -> None:
    found = studio.http.get("/openapi.json").json()
    assert set(found["paths"]) == {*MODEL_ROUTES, *STATUS_ROUTES}
    for path in MODEL_ROUTES:
        [content] = found["paths"][path]["post"]["requestBody"]["content"].values()
        name = content["schema"]["$ref"].removeprefix("#/components/schemas/")
        assert "model" in found["components"]["schemas"][name]["required"]
    speech = found["components"]["schemas"]["SpeechRequest"]["properties"]
    assert speech["response_format"]["default"] == "mp3"
