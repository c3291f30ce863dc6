"""``config explain --cluster``: the picture of a placement, and its errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from omni_actors.cli import main
from tests.support.readme import ROOT

PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
PIPELINE, NODES = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)[:2]
PICTURE = re.findall(r"```text\n\$ omni-actors config explain mine.yaml --cluster nodes.yaml\n(.*?)```", PAGE, re.S)[0]
"""The example of the document."""


def explain(tmp_path: Path, *arguments: str, nodes: str = NODES, pipeline: str = PIPELINE) -> Result:
    (tmp_path / "nodes.yaml").write_text(nodes)
    (tmp_path / "mine.yaml").write_text(pipeline)
    arguments = (
        "config",
        "explain",
        str(tmp_path / "mine.yaml"),
        "--cluster",
        str(tmp_path / "nodes.yaml"),
        *arguments,
    )
    return CliRunner().invoke(main, arguments)


def test_the_picture_shows_nodes_workers_devices_and_links(tmp_path: Path) -> None:
    result = explain(tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line.rstrip() for line in result.stdout.splitlines()] == PICTURE.splitlines()


def test_as_json(tmp_path: Path) -> None:
    rows = json.loads(explain(tmp_path, "--json").stdout)
    assert rows[1] == {"worker": "writer.0", "node": "g2", "devices": ["cuda:0"]}
    assert [row["worker"] for row in rows] == ["ear.0", "writer.0", "writer.1", "speaker.0"]


def test_several_links_of_one_pair_of_nodes_are_counted(tmp_path: Path) -> None:
    result = explain(tmp_path, "--set", "stages.ear.replicas=3")
    assert "├── ear on here → writer on g2  × 3\n" in result.stdout


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (
            NODES.replace("gpu,", "tpu,").replace("gpu]", "tpu]"),
            "no node can run writer.0: here, g1, g2: it does not have the label 'role=gpu'",
        ),
        ("[]", "at least one node"),
        ("[{name: a}, {name: a}]", "each name once"),
        ("{name: a}", "a list of nodes, such as"),
        ("[{name: a, cpu: 3}]", "a list of nodes, such as"),
        ("[{name: a, cpus: -3}]", "a list of nodes, such as"),
        ("[{name: a, gpus: -1}]", "a list of nodes, such as"),
        ("[{name: a}, {name: parent}]", "the first node gets this label"),
        ("[{name: a}, {name: b, labels: [parent]}]", "the first node gets this label"),
        ("[", "a list of nodes, such as"),
        ("[" * 3000, "a list of nodes, such as"),
    ],
)
def test_what_cannot_be_placed_is_an_error(nodes: str, message: str, tmp_path: Path) -> None:
    result = explain(tmp_path, nodes=nodes)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_more_workers_than_one_node_has_devices_for(tmp_path: Path) -> None:
    many = PIPELINE.replace("device: cuda, replicas: 2", "device: cuda, devices: [0, 1], replicas: 5")
    assert "no devices for another worker of 'writer'" in explain(tmp_path, pipeline=many).stderr
    enough = NODES + "- {name: g3, labels: [role=gpu], gpus: 2}\n- {name: idle}\n"
    placed = explain(tmp_path, nodes=enough, pipeline=many)
    assert placed.stdout.count("writer.") == 5, "two on each of g1 and g3, and one on g2"
    assert "1 node without workers\n" in placed.stdout
    values = CliRunner().invoke(main, ["config", "explain", str(tmp_path / "mine.yaml")]).stdout
    assert "cluster.nodes.writer" in values
