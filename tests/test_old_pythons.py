"""A Python that was built for an old C library: it lacks functions of Linux, in the parent and in every worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.readme import ROOT

LACKING = """
import fcntl, os, signal
with open(os.path.join(os.path.dirname(__file__), "processes"), "a") as file:
    print(os.getpid(), file=file)
for module, names in {
    os: ("memfd_create", "pidfd_open", "MFD_"),
    signal: ("pidfd_send_signal",),
    fcntl: ("F_SEAL_", "F_ADD_SEALS", "F_GET_SEALS"),
}.items():
    for name in [name for name in vars(module) if name.startswith(names)]:
        delattr(module, name)
"""
"""Run by each process at its start."""

SERVES = """
import os, signal, trio
from omni_actors import OmniSystem

assert not hasattr(os, "memfd_create") and not hasattr(os, "pidfd_open")

async def main():
    async with OmniSystem.open("echo", overrides={"stages.first.standby": 1}) as omni:
        print(*(replica.pid for replicas in omni.health().stages.values() for replica in replicas))
        print(await omni.generate("before").text())
        os.kill(omni.health().stages["first"][0].pid, signal.SIGKILL)
        print(await omni.generate("behind a death").text())

trio.run(main)
"""


def run(tmp_path: Path, *arguments: str) -> str:
    (tmp_path / "sitecustomize.py").write_text(LACKING)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_serves_and_survives_a_death(tmp_path: Path) -> None:
    workers, *answers = run(tmp_path, "-c", SERVES).splitlines()
    assert answers == ["before", "behind a death"]
    assert set(workers.split()) < set((tmp_path / "processes").read_text().split())


def test_the_doctor_finds_nothing_missing_in_its_kernel(tmp_path: Path) -> None:
    findings = json.loads(run(tmp_path, "-m", "omni_actors", "doctor", "echo", "--json"))["findings"]
    assert {each["status"] for each in findings if each["group"] == "kernel"} == {"OK"}


def test_credentials_of_a_cluster_are_loaded(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="it is of the extra cluster")
    program = "from omni_actors.cluster.tls import make_credentials; print(bool(make_credentials().contexts()))"
    assert run(tmp_path, "-c", program) == "True\n"
