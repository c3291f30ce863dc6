"""The Grafana dashboard of docs/: each of its queries names metrics and labels that a running server exposes."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from omni_actors import OmniSystem, config
from omni_actors.serve.pipelines import Pipelines
from omni_actors.stages.echo.engine import EchoEngine
from tests.cluster.subprocess_cluster import open_on_nodes
from tests.support.frozen import freeze
from tests.support.http_server import WATCHDOG_S, Server, Start, until

pytestmark = pytest.mark.slow

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs/grafana.json").read_text())
TARGETS = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
QUERIES = [target["expr"] for target in TARGETS]
PIPELINE = """\
name: studio
stages:
  mind:
    engine: "tests.serve.test_dashboard:Measured"
    accepts: [messages]
    emits: text
    options: {fan_out: 100, step_s: 0.01}
  mouth: {engine: "tests.support.served_engines:Speaker", accepts: [script], inputs: [mind], emits: audio}
"""
TWIN = """\
name: twin
stages: {mind: {engine: echo, accepts: [messages], emits: text}}
"""
"""It has a stage of the same name."""
SCRAPED = {"instance", "job"}
"""The labels that Prometheus adds to what it scrapes."""
_NAME = r"omni_[a-z_]+"


class Measured(EchoEngine):
    """An engine with figures, among them those of a prefix cache. Workers import it by name."""

    def gauges(self) -> dict[str, float]:
        return {"prefix_cache_queries": 8.0, "prefix_cache_hits": 4.0, "prefix_cache_bytes": 1024.0}


@pytest.fixture(scope="module")
def exposed(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, set[str]]]:
    """The labels of each sample after requests in text and speech, one of which survived the death of a worker.

    The server has two pipelines. With one, the label ``pipeline`` is missing, and the dashboard's selectors match that.
    It has no nodes: what a server adds for those comes from systems in this process.
    """
    twin = tmp_path_factory.mktemp("twin") / "twin.yaml"
    twin.write_text(TWIN)
    with start(str(twin), config=PIPELINE) as server, server.openai() as client, ThreadPoolExecutor(1) as thread:
        server.wait(lambda: server.status() == "ready", "both pipelines to load")
        question: Any = {"model": "studio", "messages": [{"role": "user", "content": "hi "}]}
        spoken = {"modalities": ["text", "audio"], "audio": {"voice": "any", "format": "wav"}}
        client.chat.completions.create(**question, **spoken)
        _kill_the_mind_of(server, lambda: thread.submit(client.chat.completions.create, **question))
        until(lambda: "omni_prefix_cache_bytes" in server.http.get("/metrics").text, "the figures of the engine")
        found: defaultdict[str, set[str]] = defaultdict(set)
        for text in (server.http.get("/metrics").text, trio.run(_exposed_on_nodes)):
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    found[sample.name] |= sample.labels.keys()
        yield dict(found)


async def _exposed_on_nodes() -> str:
    """The metrics of two pipelines, one of which has a node of its own."""
    pipeline = config.load("echo")
    async with (
        open_on_nodes(pipeline, {"first": "a", "second": "parent"}) as cluster,
        OmniSystem.open("echo", overrides={"name": "other"}) as other,
    ):
        return Pipelines([cluster.omni, other]).exposition().decode()


def _kill_the_mind_of(server: Server, ask: Any) -> None:
    """Kill a worker that holds a request, and read the answer to its end."""
    pid = server.http.get("/health", params={"pipeline": "studio"}).json()["stages"]["mind"][0]["pid"]
    freeze(pid)  # so that it holds the request for as long as this takes
    answer = ask()
    server.wait_metric('omni_requests_in_flight{pipeline="studio"}', 1)
    os.kill(pid, signal.SIGKILL)
    assert answer.result(WATCHDOG_S).choices[0].message.content == "hi " * 100


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_names_what_a_server_exposes(exposed: dict[str, set[str]], query: str) -> None:
    selectors = re.findall(rf"({_NAME})(?:{{([^}}]*)}})?", query)
    assert selectors
    for name, matchers in selectors:
        assert name in exposed
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        for group in re.findall(r"\bby \(([^)]*)\)", query):
            labels |= set(re.split(r",\s*", group))
        assert labels <= exposed[name] | SCRAPED, name


def test_a_legend_names_labels_that_its_query_returns(exposed: dict[str, set[str]]) -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            wanted = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            grouped = re.findall(r"\bby \(([^)]*)\)", target["expr"])
            name = re.findall(_NAME, target["expr"])[0]
            known = set(re.split(r",\s*", grouped[0])) if grouped else exposed[name]
            assert wanted <= known, target


@pytest.mark.parametrize("target", TARGETS, ids=QUERIES)
def test_stages_of_two_pipelines_with_one_name_are_told_apart(
    exposed: dict[str, set[str]], target: dict[str, str]
) -> None:
    for name, matchers in re.findall(rf"({_NAME}){{([^}}]*)}}", target["expr"]):
        assert ('pipeline=~"$pipeline"' in matchers) == ("pipeline" in exposed[name])
    for labels in [*re.findall(r"\bby \(([^)]*)\)", target["expr"]), target["legendFormat"]]:
        if re.search(r"\b(stage|producer)\b", labels):
            assert "pipeline" in labels


def test_a_variable_takes_its_values_from_what_a_server_exposes(exposed: dict[str, set[str]]) -> None:
    queries = [each["definition"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    assert queries
    for query in queries:
        found = re.fullmatch(rf"label_values\(({_NAME}), (\w+)\)", query)
        assert found is not None
        assert found[2] in exposed[found[1]] | SCRAPED


def test_the_panels_neither_share_an_id_nor_a_place() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_the_dashboard_shows_every_histogram(exposed: dict[str, set[str]]) -> None:
    histograms = {name.removesuffix("_bucket") for name in exposed if name.endswith("_bucket")}
    shown = {name.removesuffix("_bucket") for query in QUERIES for name in re.findall(_NAME, query)}
    assert histograms <= shown
