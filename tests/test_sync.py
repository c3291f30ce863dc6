"""The blocking face: its calls, and every way in which a caller may leave."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from omni_actors import OmniSystem
from omni_actors.errors import (
    Aborted,
    ConfigError,
    InvalidRequest,
    SlowConsumer,
    StageCrashed,
    SystemClosed,
    Unsupported,
)
from omni_actors.generation import Generation
from omni_actors.orchestrator.pieces import Input
from omni_actors.sync import Omni
from tests.support import endless_answers
from tests.support.endless_answers import ENDLESS, OUTPUT_BYTES, UNREAD_BYTES

WATCHDOG_S = 60.0
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def omni() -> Iterator[Omni]:
    with Omni.open(endless_answers.pipeline()) as omni:
        yield omni


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WATCHDOG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# what trio's face does


def test_a_generation_yields_outputs(omni: Omni) -> None:
    assert [(out.stage, out.modality, out.delta) for out in omni.generate("hello")] == [("short", "text", "hello")]


def test_the_rest_of_an_answer_is_collected(omni: Omni) -> None:
    generation = omni.generate("hello", request_id="mine")
    assert generation.request_id == "mine"
    assert (generation.text(), generation.audio(), generation.collect().text) == ("hello", None, "hello")


def test_submit_takes_inputs_by_kind(omni: Omni) -> None:
    assert omni.submit({"script": [Input({"text": "a"})]}, ("text",)).text() == "a"


def test_an_error_has_its_type(omni: Omni) -> None:
    with pytest.raises(InvalidRequest, match="no stage of this request takes the parameter 'speed'"):
        omni.generate("hello", speed=2)


def test_abort_ends_a_request_by_name_and_by_object(omni: Omni) -> None:
    named, held = omni.generate("x", modalities=ENDLESS, request_id="a"), omni.generate("x", modalities=ENDLESS)
    next(named)
    omni.abort("a")
    held.abort()
    for generation in (named, held):
        with pytest.raises(Aborted):
            next(generation)
    assert omni.in_flight == 0


def test_an_abort_gives_what_was_freed(omni: Omni) -> None:
    running = [omni.generate("x", modalities=ENDLESS) for _ in range(2)]
    names = [each.request_id for each in running]
    assert list(omni.abort(names).result().requests) == names
    assert omni.in_flight == 0


def test_abort_all_gives_the_reason(omni: Omni) -> None:
    generation = omni.generate("x", modalities=ENDLESS)
    omni.abort_all("enough")
    with pytest.raises(Aborted, match="enough"):
        generation.collect()


def test_the_state_is_that_of_the_system(omni: Omni) -> None:
    assert omni.is_running
    assert not omni.errored
    assert omni.dead_error is None
    assert (omni.in_flight, omni.make_room()) == (0, False)
    assert omni.descriptors > 0
    assert omni.retry_after_s > 0
    assert omni.check_health() == omni.health()
    assert omni.health().ready
    assert omni.live_state().ready
    omni.wait_ready()
    assert b"omni_ring_payload_bytes" in omni.metrics.exposition()
    assert omni.pipeline.name == "endless"


def test_the_death_of_a_worker_reaches_the_reader(omni: Omni, fixture_processes: set[int]) -> None:
    generation = omni.generate("x", modalities=ENDLESS, on_failure="fail")
    next(generation)
    os.kill(omni.health().stages["endless"][0].pid or 0, signal.SIGKILL)
    with pytest.raises(StageCrashed):
        for _ in generation:
            pass
    while not omni.health().ready:
        omni.wait_changed()
    fixture_processes.add(omni.health().stages["endless"][0].pid or 0)


@pytest.mark.parametrize("name", [name for name, _ in inspect.getmembers(OmniSystem) if name[0] != "_"])
def test_a_method_has_the_arguments_of_the_systems(name: str) -> None:
    original, ours = getattr(OmniSystem, name), getattr(Omni, name)
    if callable(original):
        expected = inspect.signature(original).parameters
        assert inspect.signature(ours).parameters == expected
        assert list(inspect.signature(ours).parameters) == list(expected)


# many prompts


def test_map_takes_prompts_as_there_is_room(omni: Omni) -> None:
    taken = []

    def prompts() -> Iterator[str]:
        for number in range(5):
            taken.append(number)
            yield omni.generate(str(number)).text()  # a call in the middle of another one

    with omni.map(prompts(), concurrency=2) as answers:
        first = next(answers)
        assert len(taken) == 3
        found = [first, *answers]
    assert sorted((answer.index, answer.text) for answer in found) == [(n, str(n)) for n in range(5)]


WRONG: Any = 7
"""A prompt that fails at once."""


def test_map_raises_the_first_error_and_aborts_the_rest(omni: Omni) -> None:
    with pytest.raises(InvalidRequest):
        list(omni.map(["a", WRONG, "b"], modalities=ENDLESS))
    until(lambda: omni.in_flight == 0)


def test_a_complete_answer_comes_before_an_error_of_the_prompts(omni: Omni) -> None:
    def prompts() -> Iterator[str]:
        yield "a"
        raise ZeroDivisionError

    with omni.map(prompts(), concurrency=1) as answers:
        assert next(answers).text == "a"
        with pytest.raises(ZeroDivisionError):
            next(answers)
        assert list(answers) == []


@pytest.mark.parametrize("concurrency", ["2", 2.5, 0, -3, True])
def test_map_refuses_a_concurrency_that_is_no_number_of_requests(omni: Omni, concurrency: Any) -> None:
    with pytest.raises(InvalidRequest, match="from 1 on") as refused:
        omni.map(["a"], concurrency=concurrency)
    assert refused.value.param == "concurrency"


def test_several_threads_may_read_the_answers_of_a_map(omni: Omni) -> None:
    """More of them wait than there are answers left: all end."""
    answers = omni.map(["a", "b"], concurrency=1)
    found = list[str]()
    threads = [
        threading.Thread(target=lambda: found.extend([answer.text for answer in answers]), daemon=True)
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WATCHDOG_S)
    assert not any(thread.is_alive() for thread in threads)
    assert sorted(found) == ["a", "b"]


def test_answers_that_are_dropped_abort_the_rest(omni: Omni) -> None:
    answers = omni.map([WRONG, "a", "b"], modalities=ENDLESS, keep_errors=True)
    assert isinstance(next(answers).error, InvalidRequest)
    until(lambda: omni.in_flight == 2)
    del answers
    until(lambda: omni.in_flight == 0)


def test_answers_that_are_dropped_behind_an_error_of_the_prompts_abort_the_rest(omni: Omni) -> None:
    """The error is kept for the next call, and keeps nothing alive."""

    def prompts() -> Iterator[Any]:
        yield WRONG
        yield "a"
        raise ZeroDivisionError

    answers = omni.map(prompts(), modalities=ENDLESS, keep_errors=True, concurrency=2)
    assert isinstance(next(answers).error, InvalidRequest)
    until(lambda: omni.in_flight == 1)
    gc.disable()
    try:
        del answers
        if sys.version_info >= (3, 12):  # there, the frames of the error's traceback refer to those of their callers
            gc.collect()
        until(lambda: omni.in_flight == 0)
    finally:
        gc.enable()


def test_answers_that_are_closed_raise_no_error_of_the_prompts(omni: Omni) -> None:
    def prompts() -> Iterator[str]:
        yield "a"
        raise ZeroDivisionError

    with omni.map(prompts(), concurrency=1) as answers:
        next(answers)
    assert list(answers) == []


def test_answer_all_shows_progress(omni: Omni, capsys: pytest.CaptureFixture[str]) -> None:
    answers = omni.answer_all(["a", WRONG, "c"], keep_errors=True)
    assert [(answer.index, answer.text) for answer in answers] == [(0, "a"), (1, ""), (2, "c")]
    assert "3/3" in capsys.readouterr().err
    omni.answer_all(["a"], progress=False)
    assert capsys.readouterr() == ("", "")


def test_an_iterator_among_the_arguments_of_a_call_may_use_the_system(omni: Omni) -> None:
    with pytest.raises(Unsupported, match="detokenize"):
        omni.detokenize(len(output.stage) for output in omni.generate("x"))
    running = [omni.generate("x", modalities=ENDLESS) for _ in range(2)]
    assert len(omni.abort(each.request_id for each in running if next(each)).result().requests) == 2


def test_many_threads_call_at_once(omni: Omni) -> None:
    def ask(thread: int) -> list[str]:
        return [omni.generate(f"{thread} {number}").text() for number in range(10)]

    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(ask, thread) for thread in range(8)]
    expected = [[f"{thread} {number}" for number in range(10)] for thread in range(8)]
    assert [each.result() for each in asked] == expected


# leaving


def test_a_generation_that_is_dropped_half_way_is_aborted(omni: Omni) -> None:
    for _ in omni.generate("x", modalities=ENDLESS):
        break
    until(lambda: omni.in_flight == 0)
    generation = omni.generate("x", modalities=ENDLESS)
    next(generation)
    cycle = [generation]
    cycle.append(cycle)  # type: ignore[arg-type]
    del generation, cycle
    assert omni.in_flight == 1
    gc.collect()
    until(lambda: omni.in_flight == 0)


def test_ctrl_c_ends_a_read_and_aborts_its_request(omni: Omni) -> None:
    main = threading.main_thread().ident
    assert main == threading.get_ident()
    generation = omni.generate("x", modalities=ENDLESS)

    def interrupt() -> None:
        until(lambda: bool(omni.background._pending))  # the read has begun
        signal.pthread_kill(main, signal.SIGINT)

    with ThreadPoolExecutor(1) as thread, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        thread.submit(interrupt)
        generation.collect()
    until(lambda: omni.in_flight == 0)
    with pytest.raises(Aborted):
        next(generation)
    assert omni.generate("and on").text() == "and on"


@pytest.mark.slow
def test_a_slow_reader_has_the_bound_of_trios_face(omni: Omni) -> None:
    def expect(error: SlowConsumer) -> None:
        assert (error.limit, error.bound) == ("output_bytes", UNREAD_BYTES)
        assert UNREAD_BYTES < error.unread_bytes <= UNREAD_BYTES + 2 * OUTPUT_BYTES

    generation = omni.generate("x", modalities=ENDLESS)
    next(generation)
    until(lambda: omni.in_flight == 0)
    with pytest.raises(SlowConsumer) as caught:
        next(generation)
    expect(caught.value)

    async def in_trio(system: OmniSystem) -> None:
        generation: Generation = system.generate("x", modalities=ENDLESS)
        await anext(generation)
        while system.in_flight:  # noqa: ASYNC110 - no event announces it
            await trio.sleep(0.002)
        with pytest.raises(SlowConsumer) as caught:
            await anext(generation)
        expect(caught.value)

    omni.background.start(in_trio).result(WATCHDOG_S)


# the end of the system


def test_closing_ends_what_waits_and_every_later_call() -> None:
    before = psutil.Process().children()
    omni = Omni.open(endless_answers.pipeline())
    generation, unread = omni.generate("x", modalities=ENDLESS), omni.generate("x")
    with ThreadPoolExecutor(2) as threads:
        reading = threads.submit(lambda: list(generation))
        waiting = threads.submit(lambda: [omni.wait_changed() for _ in range(1_000_000)])
        until(lambda: omni.in_flight > 0)
        omni.close()
    assert psutil.Process().children() == before
    for waited in (reading, waiting):
        with pytest.raises(SystemClosed, match="the system is closed"):
            waited.result()
    omni.close()
    assert not omni.is_running
    for call in (unread.text, lambda: omni.generate("x"), omni.health, lambda: list(omni.map(["x"]))):
        with pytest.raises(SystemClosed, match="the system is closed"):
            call()
    generation.abort()
    with pytest.raises(RuntimeError):  # as in trio
        omni.wait_ready()


def test_two_threads_close_at_once() -> None:
    omni = Omni.open(endless_answers.pipeline(), wait_ready=False)
    with ThreadPoolExecutor(2) as threads:
        for closing in [threads.submit(omni.close) for _ in range(2)]:
            closing.result(WATCHDOG_S)


def test_what_ends_the_system_reaches_the_caller() -> None:
    omni = Omni.open(endless_answers.pipeline())
    generation = omni.generate("x", modalities=ENDLESS)

    def fail(system: OmniSystem) -> None:
        async def bug() -> None:
            raise ArithmeticError("a bug")

        assert system._orchestrator._inputs.nursery is not None
        system._orchestrator._inputs.nursery.start_soon(bug)

    omni.background.call(fail)
    with pytest.raises(SystemClosed) as caught:
        omni.wait_changed()
    assert isinstance(caught.value.__cause__, ExceptionGroup)
    with pytest.raises(SystemClosed):
        generation.collect()
    with pytest.raises(ExceptionGroup):
        omni.close()


def test_a_face_that_is_dropped_closes_its_system() -> None:
    omni = Omni.open(endless_answers.pipeline(), wait_ready=False)
    ended = omni.background.ended
    generation = omni.generate("x")
    del omni
    assert generation.text() == "x", "a generation keeps it"
    del generation
    ended.result(WATCHDOG_S)


def test_an_error_at_opening_has_its_type() -> None:
    threads = set(threading.enumerate())
    with pytest.raises(ConfigError):
        Omni.open("nothing")
    assert set(threading.enumerate()) <= threads


SCRIPT = """
    import os, sys
    from omni_actors.sync import Omni

    omni = Omni.open("echo")
    print(*(stage[0].pid for stage in omni.health().stages.values()), flush=True)
    generation = omni.generate("x")
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        print(generation.text(), flush=True)
    else:
        try:
            generation.text()
        except RuntimeError as error:
            print(type(error).__name__, omni.is_running, flush=True)
        omni.close()
        sys.exit()
"""


@pytest.mark.parametrize("end", ["", "os._exit(0)", "os.kill(os.getpid(), 9)"])
@pytest.mark.slow
def test_a_process_that_forks_and_does_not_close_leaves_no_process(end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(SCRIPT) + end],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
        check=False,
    )
    workers, *lines = done.stdout.splitlines()
    assert (done.returncode, lines, done.stderr) == (-9 if "kill" in end else 0, ["SystemClosed False", "x"], "")
    until(lambda: not any(psutil.pid_exists(int(pid)) for pid in workers.split()))
