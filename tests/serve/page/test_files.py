"""The page's files, its facts, and the faults that it injects, as HTTP clients see them."""

from __future__ import annotations

import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from omni_actors.serve.page.files import read_files
from omni_actors.serve.settings import ServerSettings
from tests.support.http_server import NO_TLS, WATCHDOG_S, Server, Start

MAX_BYTES = 300_000
STATIC = Path(__file__).parents[3] / "omni_actors" / "serve" / "page" / "static"


def test_the_page_is_small_and_every_vendored_file_has_its_version_and_licence() -> None:
    assert sum(len(content) for content, _ in read_files().values()) <= MAX_BYTES
    vendored = {path.name for path in (STATIC / "vendor").iterdir()}
    assert vendored == {
        *("htm-preact-3.1.1.js", "uplot-1.6.32.js", "uplot-1.6.32.css"),
        *("htm.LICENSE", "preact.LICENSE", "uplot.LICENSE"),
    }


def test_every_file_is_served_without_a_key_and_its_references_exist(slow: Server) -> None:
    files = read_files()
    with _client(slow) as stranger:
        for path, (content, media_type) in files.items():
            found = stranger.get(path)
            assert (found.status_code, found.content) == (200, content)
            assert found.headers["content-type"] == media_type
            assert "default-src 'none'" in found.headers["content-security-policy"]
            assert "unsafe" not in found.headers["content-security-policy"]
            assert found.headers["x-content-type-options"] == "nosniff"
        again = stranger.get("/", headers={"if-none-match": stranger.get("/").headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert stranger.get("/page/../settings.py").status_code == 401
    index = files["/"][0].decode()
    assert set(re.findall(r'(?:src|href)="([^"]+)"', index)) <= files.keys()
    assert "<style" not in index
    for path in (path for path in files if path.startswith("/page/js/")):
        for name in re.findall(r'from "\./([^"]+)"', files[path][0].decode()):
            assert f"/page/js/{name}" in files, (path, name)


def test_the_facts_need_the_key(slow: Server) -> None:
    refused = httpx.get(f"{slow.url}/page/facts", timeout=WATCHDOG_S, verify=NO_TLS)
    assert refused.status_code == 401
    assert "studio" not in refused.text
    facts = slow.http.get("/page/facts").json()
    assert facts == {"needs_key": True, "has_realtime": True, "has_chaos": False, "pipelines": ["studio"]}


@pytest.mark.parametrize(
    ("host", "page", "expected"),
    [
        ("127.0.0.1", None, True),
        ("localhost", None, True),
        ("::1", None, True),
        ("0.0.0.0", None, False),
        ("example.org", None, False),
        ("0.0.0.0", True, True),
        ("127.0.0.1", False, False),
    ],
)
def test_the_page_is_on_by_default_on_loopback_only(host: str, page: bool | None, expected: bool) -> None:
    assert ServerSettings(host=host, page=page).has_page is expected


@pytest.mark.parametrize("settings", [{"host": "0.0.0.0"}, {"host": "0.0.0.0", "page": True}, {"page": False}])
def test_chaos_needs_the_page_and_a_loopback_address(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="--chaos"):
        ServerSettings(chaos=True, **settings)  # type: ignore[arg-type]


def test_a_server_without_the_page_has_none_of_its_routes(start: Start) -> None:
    with start("--no-page") as server:
        for path in ("/", "/page/page.css", "/page/facts"):
            assert server.http.get(path).status_code == 404
        assert server.http.post("/v1/chaos").status_code == 404


def test_a_server_without_chaos_refuses_faults(studio: Server) -> None:
    pid = studio.pid_of("mind")
    assert studio.http.post("/v1/chaos", params={"stage": "mind", "fault": "kill"}).status_code == 404
    assert studio.pid_of("mind") == pid


def test_faults_reach_the_worker_and_only_through_a_loopback_host(start: Start) -> None:
    with start("--chaos", api_key="sesame") as server:

        def inject(headers: dict[str, str] | None = None, **query: str) -> httpx.Response:
            return server.http.post("/v1/chaos", params=query, headers=headers)

        kill = {"stage": "mind", "fault": "kill"}
        pid = server.pid_of("mind")
        assert httpx.post(f"{server.url}/v1/chaos", params=kill, timeout=WATCHDOG_S, verify=NO_TLS).status_code == 401
        assert inject({"host": "evil.example.org"}, **kill).status_code == 421
        for wrong in (
            {"stage": "mind"},
            {"fault": "kill", "stage": "x"},
            {**kill, "replica": "7"},
            {**kill, "fault": "x"},
        ):
            assert inject(**wrong).status_code == 400
        assert server.pid_of("mind") == pid

        assert inject(stage="mind", fault="freeze").json() == {"fault": "freeze", "pid": pid}
        server.wait(lambda: _status(pid) == "T", "the worker to stand still")
        assert _code(inject(stage="mind", fault="starve")) == "frozen"
        assert _status(pid) == "T", "starving it would have thawed it"
        assert server.http.get("/v1/chaos").json() == {"frozen": {"mind.0": pid}}
        assert server.http.get("/v1/chaos", headers={"host": "evil.example.org"}).status_code == 421
        assert inject(stage="mind", fault="thaw").status_code == 200
        server.wait(lambda: _status(pid) != "T", "the worker to run again")
        assert server.http.get("/v1/chaos").json() == {"frozen": {}}

        assert inject(**kill).json() == {"fault": "kill", "pid": pid}
        server.wait(lambda: server.replica("mind")["generation"] == 2 and server.status() == "ready", "a new worker")
        assert server.replica("mind")["history"][0]["signal"] == "SIGKILL"


def _client(server: Server) -> httpx.Client:
    """A client without a key, and with connections of its own. To be closed."""
    return httpx.Client(base_url=server.url, timeout=WATCHDOG_S, verify=NO_TLS)


def _code(refusal: httpx.Response) -> str:
    assert refusal.status_code == 409
    code: str = refusal.json()["error"]["code"]
    return code


def _status(pid: int) -> str:
    """Return the state letter of a process: "T" while it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
def test_a_starved_worker_runs_again_when_the_client_has_gone(start: Start) -> None:
    """Starving that the server does not end lasts ten minutes. Until then it refuses to freeze the worker."""
    with start("--chaos", module="tests.support.starving_server") as server:
        pid = server.pid_of("mind")

        def injects(fault: str) -> bool:
            return server.http.post("/v1/chaos", params={"stage": "mind", "fault": fault}).status_code == 200

        with socket.create_connection(("127.0.0.1", server.port)) as leaver:
            head = b"POST /v1/chaos?stage=mind&fault=starve HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
            leaver.sendall(head)
            server.wait(lambda: _status(pid) == "T", "the worker to be starved")
            assert not injects("freeze")
        server.wait(lambda: injects("freeze"), "the worker not to be starved any more")
        assert injects("thaw")
        question = {"model": "studio", "messages": [{"role": "user", "content": "hello"}]}
        assert server.http.post("/v1/chat/completions", json=question).status_code == 200
        assert server.pid_of("mind") == pid


@pytest.mark.slow
def test_a_starved_worker_is_not_frozen(start: Start) -> None:
    """It would be thawed by the next signal of the starvation, and be called frozen."""
    fault = {"stage": "mind", "fault": "starve"}
    with start("--chaos") as server, ThreadPoolExecutor() as threads, _client(server) as client:
        pid = server.pid_of("mind")
        starving = threads.submit(client.post, "/v1/chaos", params=fault)
        server.wait(lambda: _status(pid) == "T", "the worker to be starved")
        assert _code(server.http.post("/v1/chaos", params={**fault, "fault": "freeze"})) == "starved"
        assert starving.result().status_code == 200
        assert server.http.get("/v1/chaos").json() == {"frozen": {}}
        server.wait(lambda: _status(pid) != "T", "the worker to run again")
        for fault["fault"] in ("freeze", "thaw"):
            assert server.http.post("/v1/chaos", params=fault).status_code == 200
