"""How workers share the machine's cores: with how many threads, where, and who goes first."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import trio

from omni_actors import OmniSystem
from omni_actors.config import Pipeline, Stage
from omni_actors.errors import StageCrashed
from omni_actors.orchestrator.pieces import Input
from omni_actors.platform import cpu_sharing as module
from omni_actors.platform.cpu_sharing import LONGEST_S, SHARE, WORKERS, CpuSharing, CpuSharingPage
from omni_actors.protocol.messages import CLIENT_ADDRESS, Address, Finished, Ping, Pong
from omni_actors.stages.base import StageContext, StageFailure, StageOutput
from omni_actors.stages.echo.engine import EchoEngine
from tests.support.engine_loop_harness import LoopHarness, echo, open_harness, receive, send

WATCHDOG_S = 60.0
CORES = len(os.sched_getaffinity(0))
BELOW = Address("below", 0)
FAR = 1000
"""A core of which the page cannot tell."""


class Asking(EchoEngine):
    """Says how many threads it would compute with. Workers import it by name."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        assert context.thread_budget is not None
        self._team = context.thread_budget

    def step(self) -> Iterator[StageOutput | StageFailure]:
        for output in super().step():
            assert isinstance(output, StageOutput)
            yield StageOutput(output.request_id, {}, {"text": str(self._team())}, output.last)


PIPELINE = f"""\
name: cores
stages:
  asking: {{engine: "tests.platform.test_cpu_sharing:Asking", accepts: [messages], emits: text, threads: {CORES}}}
  voice: {{engine: echo, accepts: [script], emits: audio, threads: 1}}
"""


class Machine:
    """Workers of one spawner on a machine of four cores, without their processes."""

    def __init__(self) -> None:
        self.shared = CpuSharingPage()
        self.numbers: dict[CpuSharing, int] = {}
        self.core = FAR
        """On which who computes runs."""
        self.now = 0.0
        self.moves: list[set[int]] = []

    def move(self, pid: int, cores: set[int]) -> None:
        self.moves.append(cores)
        if self.core not in cores:
            self.core = min(cores)

    def worker(self, threads: int, nice: int = 0) -> CpuSharing:
        number = self.shared.join()
        cores = CpuSharing(os.dup(self.shared.fd), number)
        cores.threads, cores.nice, self.numbers[cores] = threads, nice, number
        return cores

    def leave(self, cores: CpuSharing) -> None:
        self.shared.leave(self.numbers.pop(cores))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", machine.move)
    monkeypatch.setattr(module, "_current_core", lambda: machine.core)
    monkeypatch.setattr(module.time, "monotonic", lambda: machine.now)
    yield machine
    for cores in list(machine.numbers):
        machine.leave(cores)


def test_a_team_is_what_the_others_leave_and_one_at_least(machine: Machine) -> None:
    model, voice, vocoder = machine.worker(4), machine.worker(1), machine.worker(3)
    with model:
        assert model.thread_budget() == 4
        with voice:
            assert model.thread_budget() == 3
            with vocoder:
                assert model.thread_budget() == 1
            assert model.thread_budget() == 3
        assert model.thread_budget() == 4


def test_the_parent_leaves_the_cores_of_those_who_compute(machine: Machine) -> None:
    machine.core = 1
    machine.shared.move_off_busy_core()
    assert not machine.moves, "there is nobody"
    one, other = machine.worker(1), machine.worker(1)
    machine.shared.move_off_busy_core()
    assert not machine.moves, "nobody computes"
    with one:
        machine.shared.move_off_busy_core()
        assert machine.moves == [{0, 2, 3}, {0, 1, 2, 3}]
        assert machine.core == 0
        machine.shared.move_off_busy_core()
        assert len(machine.moves) == 2, "it is out of the way"
        with other:
            machine.shared.move_off_busy_core()
            assert machine.core == 2
    machine.moves.clear()
    machine.shared.move_off_busy_core()
    assert not machine.moves


async def test_the_event_loop_gives_way_whenever_it_wakes_while_there_are_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways: list[CpuSharingPage] = []
    monkeypatch.setattr(CpuSharingPage, "move_off_busy_core", lambda cores: ways.append(cores))
    pipeline = Pipeline(name="one", stages={"only": Stage(engine="echo", accepts=("script",), emits="audio")})
    for _ in range(2):
        async with OmniSystem.open(pipeline) as omni:
            await omni.wait_ready()
            ways.clear()
            await trio.lowlevel.checkpoint()
            assert len(ways) == 1
        ways.clear()
        await trio.lowlevel.checkpoint()
        assert not ways


def test_two_who_would_have_all_cores_share_them(machine: Machine) -> None:
    one, other = machine.worker(4), machine.worker(4)
    with one:
        assert one.thread_budget() == 4
        with other:
            assert other.thread_budget() == 1
            assert one.thread_budget() == 3
            assert other.thread_budget() == 1
        assert one.thread_budget() == 4


def test_the_dead_compute_no_more_and_their_number_is_given_again(machine: Machine) -> None:
    model, doomed = machine.worker(2), machine.worker(4)
    doomed.__enter__()
    assert model.thread_budget() == 1
    number = machine.numbers[doomed]
    machine.leave(doomed)
    assert model.thread_budget() == 2
    assert machine.numbers[machine.worker(1)] == number


def test_who_begins_to_compute_moves_off_the_cores_of_those_who_do(machine: Machine) -> None:
    model, voice, vocoder = machine.worker(2), machine.worker(1), machine.worker(1)
    everywhere = {0, 1, 2, 3}
    machine.core = 1
    with model:
        with voice:
            assert machine.moves == [{0, 2, 3}, everywhere], "moved, and let go at once"
            with vocoder:
                assert machine.moves[2:] == [{2, 3}, everywhere]
        machine.moves.clear()
        with voice:
            assert machine.moves == [], "nobody is where it is"
        machine.core = 3
        model.thread_budget()  # the kernel has moved it
        with voice:
            assert machine.moves == [{0, 1, 2}, everywhere]


def test_where_others_run_on_every_core_the_kernel_decides(machine: Machine) -> None:
    others = [machine.worker(1) for _ in range(4)]
    for machine.core, other in enumerate(others):
        other.__enter__()
    with machine.worker(1):
        assert machine.moves == []
    machine.leave(others[2])
    with machine.worker(1):
        assert machine.moves == [{2}, {0, 1, 2, 3}]


def test_who_stands_back_more_lets_the_first_words_of_the_others_go_first(machine: Machine) -> None:
    thinker, talker, decoder = machine.worker(1), machine.worker(1, nice=10), machine.worker(1, nice=15)
    workers = [thinker, talker, decoder]
    assert [worker.should_yield() for worker in workers] == [False] * 3
    thinker.announce_first_output(pending=True)
    assert [worker.should_yield() for worker in workers] == [False, True, True]
    talker.announce_first_output(pending=True)
    thinker.announce_first_output(pending=False)
    assert [worker.should_yield() for worker in workers] == [False, False, True]
    machine.leave(talker)
    assert not decoder.should_yield(), "the dead are awaited no more"


def test_whoever_stands_back_does_so_for_a_time(machine: Machine) -> None:
    thinker, talker = machine.worker(1), machine.worker(1, nice=10)
    thinker.announce_first_output(pending=True)

    def stood_back() -> float:
        began = machine.now
        while True:
            with talker:
                if not talker.should_yield():
                    return machine.now - began
            machine.now += LONGEST_S / 64

    assert stood_back() == LONGEST_S
    assert stood_back() == 0.0
    with talker:
        machine.now += 4 * LONGEST_S
    assert stood_back() == pytest.approx(SHARE * 4 * LONGEST_S, abs=LONGEST_S / 64), (
        "and for a share of what it computes"
    )
    machine.now += LONGEST_S / 2
    assert stood_back() == pytest.approx(LONGEST_S / 2, abs=LONGEST_S / 64), "and for as long as it had nothing to do"
    machine.now += 100 * LONGEST_S
    assert stood_back() == LONGEST_S, "and no longer for a long rest"


def test_a_turn_that_stands_back_is_of_that_time_too_and_rest_after_it_is_not(machine: Machine) -> None:
    thinker, talker = machine.worker(1), machine.worker(1, nice=10)
    thinker.announce_first_output(pending=True)
    with talker:
        assert talker.should_yield()
        machine.now += LONGEST_S / 2  # it takes in what comes
    with talker:
        assert talker.should_yield()
    with talker:
        pass  # what it had to do was aborted
    machine.now += 10 * LONGEST_S
    with talker:
        assert talker.should_yield()
        machine.now += LONGEST_S
    with talker:
        assert not talker.should_yield()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[CpuSharing, CpuSharing]]:
    """A worker that stands back for as long as a test takes, and another."""
    monkeypatch.setattr(module, "LONGEST_S", 1000.0)
    shared = CpuSharingPage()
    numbers = [shared.join() for _ in range(2)]
    patient, other = (CpuSharing(os.dup(shared.fd), number) for number in numbers)
    patient.nice = 5
    yield patient, other
    for number in numbers:
        shared.leave(number)


def test_while_others_go_first_a_loop_obeys_and_receives_and_does_not_step(
    patient: tuple[CpuSharing, CpuSharing],
) -> None:
    ours, other = patient
    other.announce_first_output(pending=True)
    engine = echo()
    with open_harness(ours) as harness:
        into, out = harness.input(), harness.output()
        harness.run(engine)
        harness.start(1)
        send(into, 1, 0, text="held", last=True)
        harness.loop.post(Ping(1))
        assert harness.next_message() == Pong(1)
        for _ in range(10):  # fewer doorbells have rung: it looks by the clock
            harness.loop.asleep.get(timeout=WATCHDOG_S)
        assert engine.busy
        assert out.try_recv() is None
        other.announce_first_output(pending=False)
        assert receive(out).data["text"] == "held"
        assert isinstance(harness.next_message(), Finished)


class Telling(EchoEngine):
    """Notes of each output whether its worker is urgent, before it is given out and after."""

    def __init__(self, harness: LoopHarness, other: CpuSharing) -> None:
        super().__init__(StageContext("here", None, {"fan_out": 2}, 1, "cpu", lambda note: None))
        self._bench, self._other = harness, other
        self.urgent: list[tuple[bool, bool]] = []

    def step(self) -> Iterator[StageOutput | StageFailure]:
        for output in super().step():
            assert isinstance(output, StageOutput)
            before = self._other.should_yield()
            if output.data.get("text") == "ping":
                self._bench.loop.post(Ping(1))
            if output.data.get("text") == "hidden states":
                output = StageOutput(output.request_id, last=output.last, downstream={"rows": np.zeros(1)})
            yield output
            self.urgent.append((before, self._other.should_yield()))


def test_a_loop_is_urgent_until_each_client_has_a_first_output(patient: tuple[CpuSharing, CpuSharing]) -> None:
    other, ours = patient
    with open_harness(ours) as harness:
        into, consumers = harness.input(), {target: harness.output(target=target) for target in (CLIENT_ADDRESS, BELOW)}
        engine = Telling(harness, other)
        harness.run(engine)

        def ask(
            request: int, text: str = "", targets: tuple[Address, ...] = (CLIENT_ADDRESS,), *, replayed: bool = False
        ) -> list[tuple[bool, bool]]:
            engine.urgent.clear()
            harness.start(request, targets=targets, replayed=replayed)
            send(into, request, 0, text=text, last=True)
            for target in targets:
                assert [receive(consumers[target]).seq for _ in range(2)] == [0, 1]
            harness.wait_asleep()
            assert not other.should_yield(), "when nothing is computed"
            return list(engine.urgent)

        assert ask(1) == [(True, False), (False, False)]
        assert ask(2, targets=(BELOW,)) == [(False, False)] * 2, "no client hears this"
        assert ask(3, replayed=True) == [(False, False)] * 2, "its client may have heard it"
        assert ask(4, "hidden states", (CLIENT_ADDRESS, BELOW)) == [(True, True)] * 2, "it has nothing"
        assert ask(5, "ping") == [(True, True), (False, False)], "a command that is here may be a request"
        harness.start(6, ("above", "client"))
        send(into, 6, 0, text="half of it")
        assert ask(7) == [(True, False), (False, False)], "the sixth waits for input"


async def test_a_worker_that_stands_back_waits_for_first_words_that_do_not_come_and_not_for_ever() -> None:
    pipeline = Pipeline(
        name="urgent",
        stages={
            "text": Stage(engine="echo", accepts=("messages",), emits="text", threads=1, shutdown_timeout_s=0.1),
            "voice": Stage(engine="echo", accepts=("script",), emits="audio", threads=1, nice=5),
        },
    )
    async with OmniSystem.open(pipeline) as omni:

        async def took_s() -> float:
            answer = omni.submit({"script": [Input({"text": "a"})]}, ("audio",), on_failure="fail")
            *_, end = [output async for output in answer]
            assert end.metrics is not None
            times = end.metrics.stages["voice"]
            assert times.first_input_s is not None
            return times.finished_s - times.first_input_s

        with trio.fail_after(WATCHDOG_S):
            await omni.wait_ready()
            hanging = omni.submit({"messages": [Input({"echo": {"hang": True}})]}, ("text",), on_failure="fail")
            while await took_s() < LONGEST_S / 2:
                pass  # it does not hang yet
            hanging.abort()


def test_a_page_that_cannot_be_mapped_is_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(module.mmap, "mmap", refuse)
    for _ in range(3):
        with pytest.raises(OSError, match="Too many"):
            CpuSharingPage().join()
    assert len(os.listdir("/proc/self/fd")) == before


def test_cores_that_were_taken_away_are_no_error(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, cores: set[int]) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    machine.core = 1
    with machine.worker(1), machine.worker(1):
        pass


def test_memory_and_descriptor_last_as_long_as_workers_do(machine: Machine) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    workers = [machine.worker(1) for _ in range(WORKERS + 2)]
    assert sorted(machine.numbers.values()) == [*range(WORKERS), WORKERS - 1, WORKERS - 1]
    assert len(os.listdir("/proc/self/fd")) > before
    while workers:
        machine.leave(workers.pop())
    assert machine.shared.fd == -1
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(CORES < 2, reason="there is nothing to give way with on one core")
async def test_a_worker_gives_way_to_one_that_computes_until_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "cores.yaml").write_text(PIPELINE)
    async with OmniSystem.open(tmp_path / "cores.yaml") as omni:

        async def thread_budget() -> int:
            return int("".join([output.delta async for output in omni.generate("how many?")]))

        with trio.fail_after(WATCHDOG_S):
            while await thread_budget() != CORES:
                pass  # the voice takes its first turns
            computing = omni.submit({"script": [Input({"echo": {"hang": True}})]}, ("audio",), on_failure="fail")
            while [await thread_budget(), await thread_budget()] != [CORES - 1] * 2:
                pass  # it is not in its step yet
            pid = omni.health().stages["voice"][0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(StageCrashed):
                [output async for output in computing]
            while await thread_budget() != CORES:
                pass  # it is not gone yet


LOGITS = """
from itertools import chain, cycle, repeat
from omni_actors.worker.main import _prepare_libraries

_prepare_libraries(4, spins=False)  # as a worker does, before torch is loaded

import torch
from omni_actors.stages import assets
from omni_actors.stages.base import CLIENT, Chunk, StageContext, StageRequest
from omni_actors.stages.llm.engine import open_engine
from tests.support.clear_choices import patched_choices
from tests.support.closeness import assert_close

teams = repeat(4)
model = assets.resolve("smollm2-135m-instruct")
engine = open_engine(StageContext("llm", model, {"prefill_chunk": 32}, 4, "cpu", print, lambda: next(teams)))
decoder = engine._model.model
decoder.layers = decoder.layers[:6]  # all thirty are computed alike: the others would take time alone
logits, forward = [], engine._forward

def noted(rows, count):
    result = forward(rows, count)
    logits.append(result.clone())
    return result

engine._forward = noted

def answers():
    logits.clear()
    for number, question in enumerate(["Why is the sky blue?", "Who wrote Hamlet? " * 8, "What do bees make?"]):
        engine.start(StageRequest(number, (CLIENT,), {"max_tokens": 4 + 3 * number}))
        engine.feed(number, Chunk(CLIENT, 0, True, {}, {"messages": [{"role": "user", "content": question}]}))
        list(engine.step())
    while engine.busy:
        list(engine.step())
    return list(logits)

with patched_choices():
    alone = answers()
for teams in (cycle((1, 2, 4, 3)), chain(repeat(2, 40), repeat(1))):
    with patched_choices():
        among = answers()
    assert len(among) == len(alone) > 10
    for one, other in zip(among, alone):
        assert_close(one, other)
assert torch.get_num_threads() == 1  # it did follow
"""


def test_the_language_models_logits_do_not_depend_on_the_number_of_threads() -> None:
    subprocess.run([sys.executable, "-c", LOGITS], check=True, timeout=300)
