"""How real engine loops and workers share the machine's cores."""

from __future__ import annotations

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
from omni_actors.platform.cpu_sharing import YIELD_MAX_S, CpuSharing, CpuSharingPage
from omni_actors.protocol.messages import CLIENT_ADDRESS, Address, Finished, Ping, Pong
from omni_actors.stages.base import StageContext, StageFailure, StageOutput
from omni_actors.stages.echo.engine import EchoEngine
from tests.support.engine_loop_harness import LoopHarness, echo, open_harness, receive, send
from tests.support.stage_context import stage_context

WATCHDOG_S = 60.0
CORES = len(os.sched_getaffinity(0))
BELOW = Address("below", 0)


class BudgetEngine(EchoEngine):
    """Answers with its thread budget. Workers import it by name."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        assert context.thread_budget is not None
        self._thread_budget = context.thread_budget

    def step(self) -> Iterator[StageOutput | StageFailure]:
        for output in super().step():
            assert isinstance(output, StageOutput)
            yield StageOutput(output.request_id, {}, {"text": str(self._thread_budget())}, output.last)


class SharingEngine(EchoEngine):
    """Answers with how its worker shares cores. Workers import it by name."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(context)
        sharing = getattr(context.thread_budget, "__self__", None)
        self._answer = f"{type(sharing).__name__}, OpenMP threads wait {os.environ.get('OMP_WAIT_POLICY')}"

    def step(self) -> Iterator[StageOutput | StageFailure]:
        for output in super().step():
            assert isinstance(output, StageOutput)
            yield StageOutput(output.request_id, {}, {"text": self._answer}, output.last)


PIPELINE = f"""\
name: budgets
stages:
  budget: {{engine: "{__name__}:BudgetEngine", accepts: [messages], emits: text, threads: {CORES}}}
  voice: {{engine: echo, accepts: [script], emits: audio, threads: 1}}
"""


@pytest.fixture
def yielding(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[CpuSharing, CpuSharing]]:
    """A worker that yields for as long as a test takes, and another."""
    monkeypatch.setattr(module, "YIELD_MAX_S", 1000.0)
    shared = CpuSharingPage()
    numbers = [shared.join() for _ in range(2)]
    yielding, other = (CpuSharing(os.dup(shared.fd), number) for number in numbers)
    yielding.nice = 5
    yield yielding, other
    for number in numbers:
        shared.leave(number)


def test_a_loop_that_yields_handles_commands_and_receives_but_does_not_step(
    yielding: tuple[CpuSharing, CpuSharing],
) -> None:
    ours, other = yielding
    other.announce_first_output(pending=True)
    engine = echo()
    with open_harness(ours) as harness:
        into, out = harness.input(), harness.output()
        harness.run(engine)
        harness.start(1)
        send(into, 1, 0, text="held", last=True)
        harness.post(Ping(1))
        assert harness.next_message() == Pong(1)
        for _ in range(10):  # more often than doorbells have rung: it wakes up by the clock
            harness.loop.asleep.get(timeout=WATCHDOG_S)
        assert engine.busy
        assert out.try_recv() is None
        other.announce_first_output(pending=False)
        assert receive(out).data["text"] == "held"
        assert isinstance(harness.next_message(), Finished)


class UrgencyEngine(EchoEngine):
    """Records for each output whether its worker is urgent, before the output is sent and after."""

    def __init__(self, harness: LoopHarness, other: CpuSharing) -> None:
        super().__init__(stage_context({"fan_out": 2}))
        self._harness, self._other = harness, other
        self.urgent: list[tuple[bool, bool]] = []

    def step(self) -> Iterator[StageOutput | StageFailure]:
        for output in super().step():
            assert isinstance(output, StageOutput)
            before = self._other.should_yield()
            if output.data.get("text") == "ping":
                self._harness.post(Ping(1))
            if output.data.get("text") == "hidden states":
                output = StageOutput(output.request_id, last=output.last, downstream={"rows": np.zeros(1)})
            yield output
            self.urgent.append((before, self._other.should_yield()))


def test_a_loop_is_urgent_until_each_client_has_a_first_output(yielding: tuple[CpuSharing, CpuSharing]) -> None:
    other, ours = yielding
    with open_harness(ours) as harness:
        into, consumers = harness.input(), {target: harness.output(target=target) for target in (CLIENT_ADDRESS, BELOW)}
        engine = UrgencyEngine(harness, other)
        harness.run(engine)

        def ask(
            request: int, text: str = "", targets: tuple[Address, ...] = (CLIENT_ADDRESS,), *, replayed: bool = False
        ) -> list[tuple[bool, bool]]:
            engine.urgent.clear()
            harness.start(request, targets=targets, replayed=replayed)
            harness.wait_asleep()  # it has taken the command and its bell
            send(into, request, 0, text=text, last=True)
            for target in targets:
                assert [receive(consumers[target]).seq for _ in range(2)] == [0, 1]
            harness.wait_asleep()
            assert not other.should_yield(), "no engine computes"
            return list(engine.urgent)

        assert ask(1) == [(True, False), (False, False)]
        assert ask(2, targets=(BELOW,)) == [(False, False)] * 2, "its outputs are for another stage"
        assert ask(3, replayed=True) == [(False, False)] * 2, "its client may have it already"
        assert ask(4, "hidden states", (CLIENT_ADDRESS, BELOW)) == [(True, True)] * 2, "its client has nothing"
        assert ask(5, "ping") == [(True, True), (False, False)], "an unhandled command may be a request"
        harness.start(6, ("above", "client"))
        send(into, 6, 0, text="half of it")
        assert ask(7) == [(True, False), (False, False)], "the sixth request waits for input"


async def test_a_worker_yields_to_a_first_output_that_never_comes_for_a_bounded_time() -> None:
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
            while await took_s() < YIELD_MAX_S / 2:
                pass  # the other engine does not hang yet
            hanging.abort()


async def test_the_event_loop_moves_off_busy_cores_at_each_wake_up_while_there_are_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[CpuSharingPage] = []
    monkeypatch.setattr(CpuSharingPage, "move_off_busy_core", lambda page: calls.append(page))
    pipeline = Pipeline(name="one", stages={"only": Stage(engine="echo", accepts=("script",), emits="audio")})
    for _ in range(2):
        async with OmniSystem.open(pipeline) as omni:
            await omni.wait_ready()
            calls.clear()
            await trio.lowlevel.checkpoint()
            assert len(calls) == 1
        calls.clear()
        await trio.lowlevel.checkpoint()
        assert not calls


@pytest.mark.parametrize("shared", [True, False])
async def test_one_setting_turns_the_sharing_of_cores_off(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[CpuSharingPage] = []
    monkeypatch.setattr(CpuSharingPage, "move_off_busy_core", lambda page: calls.append(page))
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    stage = Stage(engine=f"{__name__}:SharingEngine", accepts=("messages",), emits="text")
    async with OmniSystem.open(Pipeline(name="one", stages={"only": stage}, cpu_sharing=shared)) as omni:
        answer = "".join([output.delta async for output in omni.generate("how?") if isinstance(output.delta, str)])
    assert bool(calls) is shared
    if shared:
        assert answer == "CpuSharing, OpenMP threads wait PASSIVE"
    else:
        assert answer == "NoCpuSharing, OpenMP threads wait None"


@pytest.mark.skipif(CORES < 2, reason="one core cannot be shared")
async def test_a_worker_computes_with_fewer_threads_until_the_other_worker_is_killed(tmp_path: Path) -> None:
    (tmp_path / "budgets.yaml").write_text(PIPELINE)
    async with OmniSystem.open(tmp_path / "budgets.yaml") as omni:

        async def thread_budget() -> int:
            return int("".join([output.delta async for output in omni.generate("how many?")]))

        with trio.fail_after(WATCHDOG_S):
            while await thread_budget() != CORES:
                pass  # the voice still takes its first turns
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
from omni_actors.worker.main import prepare_libraries

prepare_libraries(4, spins=False)  # as a worker does before it loads torch

import torch
from omni_actors.stages import assets
from omni_actors.stages.base import CLIENT, Chunk, StageContext, StageRequest
from omni_actors.stages.llm.engine import open_engine
from tests.support.clear_choices import patched_choices
from tests.support.closeness import assert_close

budgets = repeat(4)
model = assets.resolve("smollm2-135m-instruct")
engine = open_engine(StageContext("llm", model, {"prefill_chunk": 32}, 4, "cpu", print, lambda: next(budgets)))
decoder = engine._model.model
decoder.layers = decoder.layers[:6]  # all thirty are alike: the others would only take time
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
for budgets in (cycle((1, 2, 4, 3)), chain(repeat(2, 40), repeat(1))):
    with patched_choices():
        among = answers()
    assert len(among) == len(alone) > 10
    for one, other in zip(among, alone):
        assert_close(one, other)
assert torch.get_num_threads() == 1  # the model follows its budget
"""


@pytest.mark.slow
@pytest.mark.voice
def test_the_language_models_logits_do_not_depend_on_the_number_of_threads() -> None:
    subprocess.run([sys.executable, "-c", LOGITS], check=True, timeout=300)
