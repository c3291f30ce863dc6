"""deploy/kuberay.yaml: what can be checked of it without Kubernetes, and its two commands, run as processes."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from threading import Thread
from typing import Any

import httpx
import psutil
import pytest
import yaml

from omni_actors import config
from omni_actors.serve.command import serve_command
from omni_actors.serve.settings import DEFAULTS, ServerSettings
from tests.support.http_server import NO_TLS
from tests.support.readme import ROOT

DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all((ROOT / "deploy" / "kuberay.yaml").read_text()))
WATCHDOG_S = 100.0


def document(kind: str) -> dict[str, Any]:
    [found] = [each for each in DOCUMENTS if each["kind"] == kind]
    return found


CLUSTER = document("RayCluster")["spec"]
HEAD, [GROUP] = CLUSTER["headGroupSpec"], CLUSTER["workerGroupSpecs"]
PIPELINE: str = document("ConfigMap")["data"]["pipeline.yaml"]


def container(group: dict[str, Any]) -> dict[str, Any]:
    [found] = group["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def serve_arguments() -> list[str]:
    """Return what the head's command passes to "omni-actors serve"."""
    [command] = container(HEAD)["args"]
    words = shlex.split(command.partition("exec omni-actors ")[2].replace("\\\n", " "))
    assert words[0] == "serve"
    return words[1:]


def test_the_program_accepts_the_command_line() -> None:
    arguments = ["voice" if word == "$OMNI_ACTORS_PIPELINE" else word for word in serve_arguments()]
    params = serve_command.make_context("serve", arguments).params
    assert (params["cluster"], params["port"], params["host"]) == ("auto", 8091, "0.0.0.0")
    needs_s = params["drain_notice_s"] + DEFAULTS.drain_s + 10
    assert HEAD["template"]["spec"]["terminationGracePeriodSeconds"] > needs_s


def test_the_pipeline_is_valid_and_asks_for_labels_that_its_pods_have(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(PIPELINE)
    pipeline = config.load(file)
    assert pipeline.cluster is not None
    assert pipeline.cluster.tls
    labels = {"parent", *(f"{name}={value}" for name, value in GROUP["labels"].items())}
    assert {*pipeline.cluster.nodes.values()} == labels
    assert pipeline.cluster.nodes.keys() == pipeline.stages.keys()


def test_the_version_of_ray_is_the_one_that_is_installed_with_the_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"ray=={CLUSTER['rayVersion']}" in extras["cluster"]


def test_every_name_that_is_referred_to_is_there() -> None:
    name = document("RayCluster")["metadata"]["name"]
    assert document("RayCluster")["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    assert document("Service")["spec"]["selector"] == {"ray.io/cluster": name, "ray.io/node-type": "head"}
    assert document("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == {"ray.io/cluster": name}
    for group in (HEAD, GROUP):
        volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container(group)["volumeMounts"]} == volumes.keys()
        assert volumes["pipeline"]["configMap"]["name"] == document("ConfigMap")["metadata"]["name"]
        assert int(group["rayStartParams"]["object-store-memory"]) < 128 << 20  # of the volume for /dev/shm
    ports = {port["name"]: port["containerPort"] for port in container(HEAD)["ports"]}
    [service] = document("Service")["spec"]["ports"]
    assert ports[service["targetPort"]] == service["port"] == 8091
    for name in ("startupProbe", "readinessProbe"):
        assert container(HEAD)[name]["httpGet"] == {"path": "/ping", "port": "http"}
    variables = {variable["name"] for variable in container(HEAD)["env"]}
    of_ray = {"RAY_worker_niceness", "RAY_memory_monitor_refresh_ms"}
    assert variables == {"NODES", "OMNI_ACTORS_PIPELINE", "OMNI_ACTORS_API_KEY", *of_ray}
    [nodes] = [int(variable["value"]) for variable in container(HEAD)["env"] if variable["name"] == "NODES"]
    assert nodes == 1 + GROUP["replicas"]
    assert {each["name"]: each["value"] for each in container(GROUP)["env"]} == dict.fromkeys(of_ray, "0"), (
        "the key is the server's alone"
    )


def probed(name: str, port: int, *, timeout_s: float | None = None) -> bool:
    """Return what a kubelet finds with a probe of the head's container. timeout_s: for the answer; None: the file's."""
    probe = container(HEAD)[name]
    if "httpGet" in probe:
        with suppress(httpx.TransportError):
            url = f"http://127.0.0.1:{port}{probe['httpGet']['path']}"
            return 200 <= httpx.get(url, timeout=5.0, verify=NO_TLS).status_code < 400
        return False
    *shell, script = probe["exec"]["command"]
    script = script.replace("8091", str(port))
    if timeout_s is not None:
        script = script.replace("read -rt 5", f"read -rt {timeout_s}")
    return subprocess.run([*shell, script], stderr=subprocess.DEVNULL, check=False).returncode == 0


def test_the_probes_accept_a_healthy_server_with_a_key_and_without_the_page(tmp_path: Path) -> None:
    """The server listens where the container's does: beyond loopback, it has no page by default."""
    port, log = free_port(), tmp_path / "log"
    params = serve_command.make_context("serve", ["echo", *serve_arguments()[1:]]).params
    assert not ServerSettings(host=params["host"], page=params["page"]).has_page
    command = [sys.executable, "-m", "omni_actors", "serve", "echo", "--host", params["host"], "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMNI_ACTORS_API_KEY": "secret"}
    with log.open("wb") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as server:
        try:
            until(lambda: probed("readinessProbe", port), "the server", log)
            assert probed("startupProbe", port)
            assert probed("livenessProbe", port)
        finally:
            server.terminate()


def test_the_liveness_probe_accepts_a_server_that_loads_and_no_server_that_hangs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert not probed("livenessProbe", port, timeout_s=0.2), "the kernel accepts, and nothing answers"

        def refuse() -> None:
            connection, _ = listener.accept()
            with connection, suppress(ConnectionResetError):
                connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
                while connection.recv(4096):  # closing with unread data would be a reset
                    pass

        listener.accept()[0].close()  # the connection of the probe before
        thread = Thread(target=refuse, daemon=True)
        thread.start()
        assert probed("livenessProbe", port)
        thread.join()
    assert not probed("livenessProbe", port), "nothing listens"


@contextmanager
def running(command: list[str], environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a container's command as a process. Nothing of it is left after the block: all have the same RAY_TMPDIR."""
    with log.open("wb") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process:
        try:
            yield process
        finally:
            found = list[psutil.Process]()
            for part in psutil.process_iter():
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    if part.environ().get("RAY_TMPDIR") == environment["RAY_TMPDIR"]:
                        found += [part, *part.children()]  # some of Ray's write their name over their environment
            for part in found:
                with suppress(psutil.NoSuchProcess):
                    part.kill()


def until(condition: Any, what: str, log: Path) -> None:
    give_up = time.monotonic() + WATCHDOG_S
    while not condition():
        assert time.monotonic() < give_up, f"waited for {what}: {log.read_text()}"
        time.sleep(0.1)


def address_of_head(log: Path) -> str:
    """Wait until the head can be joined, as a container of KubeRay does before that of a worker starts."""
    until(lambda: "ray start --address=" in log.read_text(), "the head", log)
    return log.read_text().partition("ray start --address='")[2].partition("'")[0]


@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.parametrize("end", ["SIGTERM", "the death of Ray's control store"])
def test_the_commands_of_both_containers_serve_a_pipeline_and_drain(end: str, tmp_path: Path) -> None:
    """What KubeRay generates is in the environment. The echo pipeline and free ports take the place of the file's."""
    gcs, http = free_port(), free_port()
    directory = mkdtemp(prefix="k-", dir="/tmp")  # Ray's sockets need a short path
    pipeline, logs = tmp_path / "pipeline.yaml", (tmp_path / "head", tmp_path / "worker")
    pipeline.write_text(
        "extends: echo\nstages: {first: {accepts: [messages]}}\n"
        "cluster: {tls: true, nodes: {first: parent, second: role=compute}}\n"
    )
    start = "ray start --block --object-store-memory=83886080"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    common = {
        **os.environ,
        "RAY_ADDRESS": f"127.0.0.1:{gcs}",
        "PATH": path,
        "RAY_TMPDIR": directory,
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": CLUSTER["authOptions"]["mode"],
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    head = common | {
        "KUBERAY_GEN_RAY_START_CMD": f"{start} --head --port={gcs} --num-cpus=0 --include-dashboard=false",
        "OMNI_ACTORS_PIPELINE": str(pipeline),
        "OMNI_ACTORS_API_KEY": "secret",
        "NODES": "2",
    }
    [line] = container(HEAD)["args"]
    line = line.replace("8091", str(http))
    client = httpx.Client(base_url=f"http://127.0.0.1:{http}", timeout=WATCHDOG_S, verify=NO_TLS)

    def answers(path: str) -> bool:
        with suppress(httpx.TransportError):
            return client.get(path).status_code == 200
        return False

    try:
        with (
            client,
            running([*container(HEAD)["command"], line], head, logs[0]) as on_head,
            running(
                [*container(GROUP)["command"], *container(GROUP)["args"]],
                common
                | {
                    "KUBERAY_GEN_RAY_START_CMD": f"{start} --labels=role=compute --num-cpus=2"
                    f" --address={address_of_head(logs[0])}"
                },
                logs[1],
            ),
        ):
            until(lambda: answers("/ping"), "the server", logs[0])
            assert all(probed(name, http) for name in ("startupProbe", "readinessProbe", "livenessProbe"))
            health = client.get("/health", headers={"authorization": "Bearer secret"}).json()
            assert set(health["nodes"]) == {each[0]["node"] for each in health["stages"].values()}
            in_container = psutil.Process(on_head.pid).children(recursive=True)
            parts = {each.name(): each for each in in_container}
            assert "OMNI_ACTORS_API_KEY" not in parts["raylet"].environ()
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                subprocess.run(container(GROUP)[probe]["exec"]["command"], check=True)
            if end == "SIGTERM":
                on_head.send_signal(signal.SIGTERM)
            else:
                parts["gcs_server"].kill()
            assert on_head.wait(WATCHDOG_S) == 0
            for part in in_container:  # they end with the container, some of Ray's not before
                with suppress(psutil.NoSuchProcess):
                    part.kill()
    finally:
        shutil.rmtree(directory)
