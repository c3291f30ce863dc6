"""The benchmark of the ring runs, names missing transports, and verifies every message that a transport delivers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.ring.__main__ import QUICK, rounds
from bench.ring.measure import Sink
from bench.ring.peers import ZmqMsgpack
from bench.ring.report import Figures

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_quick_run_measures_every_part_of_every_transport_asked_for(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "bench.ring", "--quick", "--only", "ours: send", "--only", "multiprocessing.Pipe"]
    command += ["--size", "64", "--size", "4000000", "--cores", str(cores[0]), str(cores[-1])]
    command += ["--json", str(tmp_path / "figures"), "--markdown", str(tmp_path / "tables")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures").read_text())
    assert figures["failures"] == []
    assert {(row["transport"], row["size"]) for row in figures["transports"]} == {
        ("ours: send", 64),
        ("ours: send, tuned", 64),
        ("ours: send, trio", 64),
        ("multiprocessing.Pipe", 64),
        ("ours: send", 4000000),
        ("ours: send, tuned", 4000000),
        ("ours: send, trio", 4000000),
        ("multiprocessing.Pipe", 4000000),
    }
    for row in figures["transports"]:
        assert row["bytes_per_s"][0] > 0
        assert row["latency_p50_s"] > 0
    assert len(figures["round_trips_s"]) == 4
    assert "| ours: send |" in (tmp_path / "tables").read_text()


def test_a_peer_that_is_not_installed_is_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    figures = Figures()
    rounds(figures, [ZmqMsgpack()], [64, 1024], QUICK._replace(trips=0), 1)
    assert "zmq" in figures.missing["pyzmq ipc + msgpack"]
    assert figures.names == []


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(bytes(8) + bytes(48) + b"\1" + bytes(7), id="torn"),
        pytest.param(b"\1" + bytes(55) + b"\1" + bytes(7), id="another number"),
        pytest.param(bytes(72), id="too long"),
        pytest.param(bytes(64), id="other content"),
    ],
)
def test_a_message_that_differs_from_the_sent_one_is_refused(tmp_path: Path, message: bytes) -> None:
    os.mkfifo(tmp_path / "ack")
    with pytest.raises(ValueError, match="message"):
        Sink(64, tmp_path / "ack").check(message)
