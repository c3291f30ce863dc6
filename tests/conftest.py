"""The environment of all tests.

Rules
1. A test that leaves a process or an entry in /dev/shm behind fails. Processes that ran before the test, those that a
   wider fixture has added to ``fixture_processes``, and entries that another program uses, do not count.
2. Orphans count: every process that a test starts inherits ``MARK`` in its environment, which identifies it after its
   parent has exited. A fork without exec keeps the environment of this process; it is found as a child.
3. In CI, Hypothesis draws the same examples each time, so that a failed run can be repeated.
4. With pytest-xdist (`make test`), the tests of one file run in one process, and so do files that share a session
   fixture which is expensive to make. The files that take longest begin first, so that no process idles at the end.
5. `--world` says where the workers of all systems run that tests open: see ``tests.support.worlds``.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

pytest.register_assert_rewrite("tests.orchestrator", "tests.replay", "tests.serve", "tests.stages", "tests.support")

MARK = "OMNI_ACTORS_TEST_RUN"
GRACE_S = 30.0
"""Time for an exiting process to exit."""
WATCHDOG_S = 60.0
ONE_THREAD = ("-s", "stages.llm.threads=1")
"""Other tests run at the same time, so a second thread would slow the model down."""

os.environ[MARK] = uuid.uuid4().hex
# The tests start hundreds of processes: numpy imports twice as fast without a pool of threads.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
# Engines run in this process too, so it takes the settings of a worker: onnxruntime's telemetry would open sockets
# while a test counts descriptors, and MKL gives the same bits whatever the alignment of its operands.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
os.environ.setdefault("MKL_CBWR", "AUTO")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; child processes would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Hundreds of processes import the same modules, so these are compiled only once, whatever the environment says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("dev", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


class ByFile(LoadScopeScheduling):
    """Rule 4. xdist's own groups have no effect under pytest 9, which fixes the test ids they are read from."""

    TOGETHER = (
        ("tests/serve/test_with_models.py", "tests/test_readme.py"),  # one server
        tuple(f"tests/stages/test_{name}.py" for name in ("conformance", "hostile_requests", "pausing", "poison")),
    )

    FIRST = (
        "tests/test_voice.py",
        "tests/stages/test_conformance.py",
        "tests/test_omni.py",
        *(f"tests/stages/{model}/test_parity.py" for model in ("qwen3", "qwen2_5")),
        "tests/test_examples.py",
        "tests/serve/test_with_models.py",
        "tests/orchestrator/test_poison_under_load.py",
        "tests/stages/qwen2_5/test_token2wav.py",
        *(f"tests/test_{name}.py" for name in ("faults", "poison", "system")),
        "tests/serve/test_server.py",
    )

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False  # xdist would begin with the files of most tests
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((files[0] for files in self.TOGETHER if file in files), file)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-api", action="store_true", help="Store what the tests of tests/api find (see there).")
    parser.addoption(
        "--world",
        choices=("local", "agents", "ray"),
        default="local",
        help="Where workers run (see tests/support/worlds.py).",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, which would visit the imported modules again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {file: number for number, file in enumerate(ByFile.FIRST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))  # stable


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def processes() -> set[int]:
    """Return the pids of this machine. Every test calls this twice, so it is cheap."""
    return {int(name) for name in os.listdir("/proc") if name.isdecimal()}


def ours(pids: Iterable[int]) -> list[psutil.Process]:
    """Return those that are descendants of this process, or orphans of earlier descendants."""
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = []
    for pid in pids:
        with suppress(OSError, psutil.NoSuchProcess):  # another user's process, or one that has exited
            if pid in children or mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(psutil.Process(pid))
    return [process for process in found if not _outlives_tests(process)]


def _outlives_tests(process: psutil.Process) -> bool:
    """multiprocessing keeps a process until the interpreter exits; Ray, of a wider fixture, some for later actors."""
    try:
        command = " ".join(process.cmdline())
        return any(part in command for part in ("resource_tracker", "ray::IDLE", "default_worker.py"))
    except psutil.Error:
        return False


def alive_after(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Return those that have not exited within the timeout, which is that of all together. A zombie has exited."""
    give_up = time.monotonic() + timeout_s
    return [process for process in processes if not _ends_within(process.pid, max(0.0, give_up - time.monotonic()))]


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
    """Return the names in /dev/shm. The project never creates one."""
    return set(os.listdir("/dev/shm"))


def used_by_others(names: set[str]) -> set[str]:
    """Return the names in /dev/shm that a process has mapped which is neither this one nor a descendant."""
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    used: set[str] = set()
    for pid in processes() - own:
        with suppress(OSError):  # another user's process, or one that has exited
            maps = Path(f"/proc/{pid}/maps").read_text()
            used |= {name for name in names if f"/dev/shm/{name}\n" in maps}
    return used


@pytest.fixture(scope="session", autouse=True)
def _world(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rule 5."""
    if (world := request.config.getoption("--world")) == "local":
        yield
        return
    from tests.support.worlds import in_world  # later than the settings above

    with in_world(world):
        yield


@pytest.fixture(scope="session")
def needs_namespaces() -> None:
    """Skip a test that needs network namespaces where they cannot be made."""
    from tests.support.network import why_no_namespaces

    if (why := why_no_namespaces()) is not None:
        pytest.skip(why)


@pytest.fixture(scope="session")
def needs_slow_lines() -> None:
    """Skip a test that needs lines with a delay between network namespaces where they cannot be made."""
    from tests.support.slow_lines import why_no_slow_lines

    if (why := why_no_slow_lines()) is not None:
        pytest.skip(why)


@pytest.fixture(scope="session")
def needs_cuts() -> None:
    """Skip a test that cuts connections of other processes where that is not allowed."""
    from omni_actors.stress import cuts

    if (why := cuts.why_not(os.getpid())) is not None:
        pytest.skip(f"connections of other processes cannot be cut: {why}")


@pytest.fixture(scope="session")
def fixture_processes() -> set[int]:
    """Pids that a fixture wider than a test has started during a test, such as restarted workers."""
    return set()


@pytest.fixture(autouse=True)
def leaves_nothing_behind(fixture_processes: set[int]) -> Iterator[None]:
    """Rule 1. Kills the processes that remain, so that the next test starts clean."""
    processes_before, shm_before = processes(), shm_entries()
    yield
    if new := processes() - processes_before - fixture_processes:
        found, children = ours(new), psutil.Process().children()
        # A test reaps its own children, so even a zombie counts as left behind. Other processes get time to exit.
        left = [process for process in found if process in children]
        left += alive_after([process for process in found if process not in children], GRACE_S)
        facts = [_describe(process) for process in left]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=GRACE_S)
        assert not left, f"processes left behind: {facts}"
    shm, deadline = shm_entries() - shm_before, time.monotonic() + GRACE_S
    while shm and time.monotonic() < deadline:
        time.sleep(0.01)  # tests in the other process use libraries that name their semaphores for a moment
        shm &= shm_entries()
    if shm:
        shm -= used_by_others(shm)
        shm &= shm_entries()  # another program may have removed one just before its use was looked for
    assert not shm, f"/dev/shm entries left behind: {sorted(shm)}"


def _describe(process: psutil.Process) -> str:
    try:
        return f"pid {process.pid} ({process.status()}): {' '.join(process.cmdline())}"
    except psutil.Error as error:
        return str(error)


@pytest.fixture(scope="session")
def wait_ended() -> Callable[[Iterable[psutil.Process]], None]:
    """Return a function that waits until processes have exited; it does not reap them."""

    def wait(processes: Iterable[psutil.Process]) -> None:
        alive = [_describe(process) for process in alive_after(processes, WATCHDOG_S)]
        assert not alive, f"still running after {WATCHDOG_S:.0f} s: {alive}"

    return wait


@pytest.fixture(scope="session")
def voice_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the README's server, `omni-actors serve voice`, on a free port; one server for all tests."""
    program = Path(sys.executable).parent / "omni-actors"
    stderr = tmp_path_factory.mktemp("voice") / "stderr"
    with (
        stderr.open("wb") as errors,
        subprocess.Popen(
            [program, "serve", "voice", "--port", "0", *ONE_THREAD], stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):
        assert process.stdout is not None
        line = ""
        try:
            while not line.startswith("ready: "):  # pytest's own time limit is the watchdog
                line = process.stdout.readline().decode()
                assert line, f"the server exited: {stderr.read_text()}"
            yield line.removeprefix("ready: ").partition("/v1")[0]
        finally:
            process.send_signal(signal.SIGINT)
    assert (process.returncode, stderr.read_text()) == (0, "")
