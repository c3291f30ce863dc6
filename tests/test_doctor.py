"""``omni-actors doctor``: what it finds on a real machine, and on one that lacks something."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from omni_actors.cli import main
from omni_actors.cli.doctor import libraries, linux, machine, models
from tests.support.readme import ROOT


def found(findings: Any) -> dict[str, Any]:
    return {finding.name: finding for finding in findings}


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_a_machine_that_runs_these_tests_has_every_kernel_feature(free_port: int) -> None:
    looked = found(machine.check(free_port))
    kernel = [finding for finding in looked.values() if finding.group == "kernel"]
    assert {finding.name for finding in kernel} == {"pidfd", "eventfd", "memfd", "unix sockets"}
    assert {finding.status for finding in kernel} == {"OK"}
    assert {looked[name].status for name in ("Python", "system", f"port {free_port}")} == {"OK"}


def test_a_port_in_use_is_a_warning_that_names_another_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        finding = found(machine.check(port))[f"port {port}"]
    assert (finding.status, finding.found) == ("warning", "Address already in use")
    assert f"--port {port + 1}" in finding.remedy


def test_a_low_limit_of_open_files_is_a_warning() -> None:
    """The limit is set in a process of its own: a hard limit cannot be raised again."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "from omni_actors.cli.doctor import machine\n"
        "print(*(f for f in machine.check() if f.name == 'open files'))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "status='warning'" in done.stdout
    assert "ulimit -Hn" in done.stdout


def test_a_kernel_feature_that_is_denied_is_an_error_with_its_use() -> None:
    """Without descriptors, no feature can be tried: each is reported, and none raises."""
    program = (
        "import resource; from omni_actors.cli.doctor import linux\n"
        "import os; used = len(os.listdir('/proc/self/fd')) - 1\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))\n"
        "print(*(linux._feature(*each).status for each in linux.FEATURES))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["error"] * len(linux.FEATURES)


def test_a_pipeline_that_the_user_names_must_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(models.check(["echo"]))["pipeline echo"].status == "OK"
    wrong = found(models.check(["ecco"]))["pipeline ecco"]
    assert wrong.status == "error"
    assert "did you mean 'echo'?" in wrong.found
    installed = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "faster_whisper" else installed(name))
    assert found(models.check([]))["pipeline voice"].status == "warning", "not asked for"
    lacking = found(models.check(["voice"]))["pipeline voice"]
    assert lacking.status == "error"
    assert "faster_whisper" in lacking.found
    assert "pip install" in lacking.remedy or "prepare" in lacking.remedy


def test_the_remedy_for_a_missing_tokenizer_helps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    file = tmp_path / "mine.yaml"

    def look(tokenizer: str) -> Any:
        stage = f"{{engine: llm, model: {tmp_path}, tokenizer: {tokenizer}, accepts: [messages], emits: text}}"
        file.write_text(f"name: mine\nstages: {{llm: {stage}}}\n")
        return found(models.check([str(file)]))[f"pipeline {file}"]

    assert look("owner/words").remedy == f"omni-actors prepare {file}"
    prepared: list[str] = []
    monkeypatch.setattr("omni_actors.stages.assets.prepare", lambda name, _: prepared.append(name))
    assert CliRunner().invoke(main, ["prepare", str(file)]).exit_code == 0
    assert prepared == ["owner/words"]
    lacking = look("/nowhere/words")
    assert "no such directory" in lacking.found
    assert "prepare" not in lacking.remedy


def test_an_engine_library_that_is_missing_is_a_warning_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    looked = found(libraries.check())
    assert {looked[name].status for name in libraries.ENGINE_LIBRARIES} == {"warning"}
    assert looked["torch"].remedy == "for the engines of the extra: pip install '.[voice]' in the clone"


def test_a_version_that_differs_from_the_lock_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    lock = tmp_path / "constraints.txt"
    lock.write_text("# a comment\nclick==0.1\nno-such-distribution==1\n")
    monkeypatch.setattr(libraries, "_lock_file", lambda: lock)
    finding = libraries._lock()
    assert finding.status == "warning"
    assert finding.found.startswith("click ")
    assert finding.found.endswith("(tested: 0.1)")


def test_a_cache_that_cannot_be_looked_at_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(path: Path, **_: Any) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "exists", deny)
    found = list(models.check(["echo"]))[:2]
    assert [each.status for each in found] == ["warning"] * 2
    assert all("Permission denied" in each.found for each in found)
    assert ["OMNI_ACTORS_CACHE" in found[0].remedy, "HF_HOME" in found[1].remedy] == [True, True]


def test_a_cache_that_is_no_directory_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "cache"
    file.touch()
    monkeypatch.setenv("OMNI_ACTORS_CACHE", str(file))
    found = next(iter(models.check(["echo"])))
    assert (found.status, found.found) == ("warning", f"{file}: not writable")


def test_a_user_without_a_home_directory_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(path: str) -> str:
        return path

    for name in ("OMNI_ACTORS_CACHE", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", no_home)
    *found, pipeline = models.check(["voice"])
    assert [(each.status, each.found.partition(":")[0]) for each in found] == [("warning", "not known")] * 2
    assert "no home directory: name a directory in OMNI_ACTORS_CACHE" in pipeline.found


OTHER_SYSTEM = """
import os, platform, signal, sys
for name in ("fcntl", "resource", "termios", "tty", "pwd", "grp"):
    sys.modules[name] = None
for name in ("sched_getaffinity", "eventfd", "memfd_create", "pidfd_open"):
    delattr(os, name)
del signal.pidfd_send_signal
platform.system, platform.machine, platform.release = lambda: "Windows", lambda: "AMD64", lambda: "11"
from omni_actors.cli import main
main({arguments!r})
"""
"""Takes from a process what only Unix systems have, before it imports the commands. The rest is a real run."""


def on_other_system(*arguments: str) -> tuple[int, str, str]:
    program = OTHER_SYSTEM.format(arguments=list(arguments))
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_another_system_gets_a_report_that_says_what_is_missing() -> None:
    code, out, err = on_other_system("doctor", "echo", "--json")
    assert (code, err) == (1, "")
    looked = {each["name"]: each for each in json.loads(out)["findings"]}
    assert looked["system"]["status"] == "error"
    assert looked["system"]["remedy"].startswith("use Linux on x86-64")
    assert {"Python", "omni-actors"} < looked.keys()
    code, out, err = on_other_system("top", "--once")
    assert (code, out) == (1, "")
    assert err.startswith("Error: this command needs Linux on x86-64")


@pytest.mark.voice  # for torch
@pytest.mark.slow
def test_the_report_and_its_exit_code(free_port: int) -> None:
    def invoke(*arguments: str) -> Any:
        return CliRunner().invoke(main, ["doctor", "--port", str(free_port), *arguments])

    good = invoke("echo", "--json")
    report = json.loads(good.stdout)
    assert (good.exit_code, report["errors"]) == (0, 0), report
    assert report["warnings"] == sum(each["status"] == "warning" for each in report["findings"])
    assert all(each["remedy"] for each in report["findings"] if each["status"] != "OK")
    assert {"torch", "CUDA"} & {each["name"] for each in report["findings"]}
    bad = invoke("ecco")
    assert bad.exit_code == 1
    assert "1 error, " in bad.stdout
    assert "→ correct the name or the file" in bad.stdout


def test_a_torch_that_cannot_be_imported_is_the_last_line_of_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "PROBE", "import no_such_torch")
    assert libraries.probe() == "ModuleNotFoundError: No module named 'no_such_torch'"
    assert [finding.status for finding in libraries._devices()] == ["error"]
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256, "no test above has lowered this process's limit"
