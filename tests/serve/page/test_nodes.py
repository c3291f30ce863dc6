"""The page of a system on a cluster, in a headless Chromium: nodes, links, and the loss of a node."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.cluster.ray_cluster import ray_cluster
from tests.serve.page.test_browser import enter, said, wait_done
from tests.support.chromium import EXECUTABLE, open_page
from tests.support.http_server import Server, Start

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.skipif(EXECUTABLE is None, reason="there is no Chromium on this machine"),
]
PIPELINE = """\
name: studio
stages:
  mind: {engine: echo, accepts: [messages], options: {fan_out: 200, step_s: 0.03}}
  mouth: {engine: echo, inputs: [mind], emits: text}
"""
STATES = "[...document.querySelectorAll('.nodes [data-state]')].map(each => each.dataset.state)"


@pytest.fixture
def on_nodes(start: Start) -> Iterator[Server]:
    """A server whose first stage is on a node of its own."""
    places = ("-s", "cluster.nodes.mind=n1", "-s", "cluster.nodes.mouth=parent")
    with ray_cluster("n1") as ray, start("--chaos", "--cluster", ray.address, *places, config=PIPELINE) as server:
        yield server


def test_the_loss_of_a_node_is_shown_while_an_answer_goes_on(on_nodes: Server, fixture_processes: set[int]) -> None:
    with open_page() as page:
        page.open(on_nodes.url)
        page.wait(f"{STATES}.length >= 1 && {STATES}.every(each => each === 'alive')")
        enter(page, "hello")
        page.wait("document.querySelector('.message.assistant .said')?.innerText.includes('hello')")
        agent = on_nodes.http.get("/health").json()["nodes"]["n1"]["agent_pid"]
        page.evaluate(f"window.seen = []; void setInterval(() => seen.push(...{STATES}), 20)")
        refused = on_nodes.http.post("/v1/chaos", params={"stage": "mind", "fault": "kill"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "on_another_node")
        assert on_nodes.http.post("/v1/chaos", params={"stage": "mouth", "fault": "thaw"}).status_code == 200
        os.kill(agent, signal.SIGKILL)
        page.wait("seen.some(each => each !== 'alive')")
        wait_done(page)
        page.wait(f"{STATES}.every(each => each === 'alive')")
        assert said(page) == "hello" * 200
        page.wait("document.querySelector('.deaths').innerText.includes('NodeLost')")
        assert page.errors == []
