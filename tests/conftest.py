"""What every test runs under.

Rules
1. A test leaves no process and no /dev/shm entry behind; one that does fails, by name, whatever it asserted.
   What was there before it (a worker of a wider fixture) is not its doing, nor is what that fixture has said to be its
   own since (``fixture_processes``).
2. Orphans count: every process started from here inherits ``MARK`` in its environment, so one that outlived its parent
   is still known as ours. A fork that execs nothing has no environment of its own; as a child it is found all the same.
3. In CI, Hypothesis draws the same examples each time: a red run can be run again.
4. Where pytest-xdist runs the tests in two processes (`make test`), the tests of a file stay in one, and all that load
   real models in one: two pipelines of them at once would be slower than one after the other. Tiny ones go anywhere.
"""

from __future__ import annotations

import compileall
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

pytest.register_assert_rewrite("tests.support")

MARK = "OMNI_ACTORS_TEST_RUN"
GRACE_S = 5.0
"""For a process that is on its way out. One that has ended but was not reaped yet is over."""
WATCHDOG_S = 60.0
"""No wait comes near it."""
ONE_THREAD = ("-s", "stages.llm.threads=1")
"""Other tests run beside: a second thread would be waited for at every operator."""

os.environ[MARK] = uuid.uuid4().hex
# Hundreds of processes are started from here, and what each does before it begins adds up.
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # with a pool of threads, numpy takes twice as long to import
# Engines are opened here too. As in a worker onnxruntime is to report to nobody: it would open sockets at any moment,
# and a test that counts descriptors is the one that fails.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; what is started here would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
for package in ("omni_actors", "ringbuf"):  # also where PYTHONDONTWRITEBYTECODE keeps an interpreter from doing it
    compileall.compile_dir(Path(__file__).parent.parent / package, quiet=2)

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("dev", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


class ByFile(LoadScopeScheduling):
    """Rule 4. xdist's own groups have no effect under pytest 9: it reads them off an id that is fixed there."""

    MODELS = (
        "tests/stages/test_",
        "tests/serve/test_with_models.py",
        "tests/test_voice.py",
        "tests/test_readme.py",
    )

    def _split_scope(self, nodeid: str) -> str:
        return "models" if nodeid.startswith(self.MODELS) else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def processes() -> set[int]:
    """Of this machine, by pid. Cheap: it is asked before and after every test."""
    return {int(name) for name in os.listdir("/proc") if name.isdecimal()}


def ours(pids: Iterable[int]) -> list[psutil.Process]:
    """Those that are descendants of this process, or orphans of former ones."""
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = []
    for pid in pids:
        with suppress(OSError, psutil.NoSuchProcess):  # another user's, or gone since it was listed
            if pid in children or mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(psutil.Process(pid))
    return [process for process in found if not _is_resource_tracker(process)]


def _is_resource_tracker(process: psutil.Process) -> bool:
    """multiprocessing keeps one such process until the interpreter ends, by design."""
    try:
        return any("resource_tracker" in argument for argument in process.cmdline())
    except psutil.Error:
        return False


def alive_after(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that have not ended by then. A zombie has: when it is reaped is its parent's affair."""
    return [process for process in processes if not _ends_within(process.pid, timeout_s)]


def _ends_within(pid: int, timeout_s: float) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], timeout_s)[0])
    finally:
        os.close(pidfd)


def shm_entries() -> set[str]:
    """All that has a name there. Nothing of ours ever has."""
    return set(os.listdir("/dev/shm"))


@pytest.fixture(scope="session")
def fixture_processes() -> set[int]:
    """Where a fixture wider than a test puts the processes that it has started since: a worker that came back."""
    return set()


@pytest.fixture(autouse=True)
def leaves_nothing_behind(fixture_processes: set[int]) -> Iterator[None]:
    """Rule 1. Processes that remain are killed, so that the next test starts clean."""
    processes_before, shm_before = processes(), shm_entries()
    yield
    if new := processes() - processes_before - fixture_processes:
        found, children = ours(new), psutil.Process().children()
        # A child is for its test to reap: one that is here, if only as a zombie, was not. Others may take a moment.
        left = [process for process in found if process in children]
        left += alive_after([process for process in found if process not in children], GRACE_S)
        facts = [_describe(process) for process in left]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=GRACE_S)
        assert not left, f"processes left behind: {facts}"
    shm, deadline = shm_entries() - shm_before, time.monotonic() + GRACE_S
    while shm and time.monotonic() < deadline:
        time.sleep(0.01)  # the tests beside use peers that give their semaphores a name, and take it back at once
        shm &= shm_entries()
    assert not shm, f"/dev/shm entries left behind: {sorted(shm)}"


def _describe(process: psutil.Process) -> str:
    try:
        return f"pid {process.pid} ({process.status()}): {' '.join(process.cmdline())}"
    except psutil.Error as error:
        return str(error)


@pytest.fixture(scope="session")
def wait_ended() -> Callable[[Iterable[psutil.Process]], None]:
    """Wait until processes have ended, whoever is to reap them."""

    def wait(processes: Iterable[psutil.Process]) -> None:
        alive = [_describe(process) for process in alive_after(processes, WATCHDOG_S)]
        assert not alive, f"still there after {WATCHDOG_S:.0f} s: {alive}"

    return wait


@pytest.fixture(scope="session")
def voice_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The README's server, `omni-actors serve voice`, on a free port, once it is ready: one for all who ask it."""
    program = Path(sys.executable).parent / "omni-actors"
    stderr = tmp_path_factory.mktemp("voice") / "stderr"
    with (
        stderr.open("wb") as errors,
        subprocess.Popen(
            [program, "serve", "voice", "--port", "0", *ONE_THREAD], stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):
        assert process.stdout is not None
        said = ""
        try:
            while not said.startswith("ready: "):  # it says so, or ends; pytest's own time limit is the watchdog
                said = process.stdout.readline().decode()
                assert said, f"the server ended: {stderr.read_text()}"
            yield said.removeprefix("ready: ").partition("/v1")[0]
        finally:
            process.send_signal(signal.SIGINT)
    assert (process.returncode, stderr.read_text()) == (0, "")
