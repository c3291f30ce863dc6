"""Replay with real processes and signals: a client gets the outputs of a run without a death, or a typed error.

The engine of these tests repeats its input and kills its own process where a chunk demands it, once for each marker
file, so the moment of each death is exact. The payload of an output is a function of its request and position, so the
tests notice outputs that are repeated, reordered or missing.
"""

from __future__ import annotations

import itertools
import os
import signal
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import trio

from omni_actors import config
from omni_actors.config import Limits, Pipeline, Restart, Stage
from omni_actors.errors import Aborted, DeadlineExceeded, InvalidRequest, StageCrashed, StageUnavailable
from omni_actors.generation import Generation, Output
from omni_actors.orchestrator.pieces import Input
from omni_actors.orchestrator.request import Request
from omni_actors.stages.echo.engine import payload
from omni_actors.system import OmniSystem
from omni_actors.system.parameters import Parameters
from tests.support.shared_system import SharedSystem, open_shared_system, with_shared_system

WATCHDOG_S = 60.0
STAGES = ("first", "second", "third")
PIECES, FAN_OUT, PAYLOAD_BYTES = 4, 2, 300
OF_A_PIECE = {"first": FAN_OUT, "third": FAN_OUT**3}
"""How many outputs for the client a stage makes of each piece of input."""
LIMITS = Limits(replays=3, retain_bytes=2_000_000)
NEVER_S = 3600.0

ENGINES = """
    import os, signal
    from omni_actors.stages.base import StageOutput
    from omni_actors.stages.echo.engine import EchoEngine

    class Mortal(EchoEngine):
        '''data["dies"]: (stage, where, marker); where: "feed", "before" or "after" an output, or at the "end".
        data["fickle"]: the output contains the process id, so that a replay differs.'''

        def feed(self, request_id, chunk):
            self.die_if_due(chunk.data, "feed")
            super().feed(request_id, chunk)

        def step(self):
            for output in super().step():
                self.die_if_due(output.data, "before")
                if "fickle" in output.data:
                    data = {**output.data, "pid": os.getpid()}
                    output = StageOutput(output.request_id, output.tensors, data, output.last)
                yield output
                self.die_if_due(output.data, "after")
                if output.last:
                    self.die_if_due(output.data, "end")

        def die_if_due(self, data, where):
            for stage, place, marker in data.get("dies", ()):
                if (stage, place) == (self._stage, where) and not os.path.exists(marker):
                    open(marker, "x").close()
                    os.kill(os.getpid(), signal.SIGKILL)
"""
_numbers = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def markers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of the marker files. The engine can be imported here and in workers."""
    path = tmp_path_factory.mktemp("mortal")
    (path / "mortal_engines.py").write_text(textwrap.dedent(ENGINES))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        patch.setenv("MARKERS", str(path))
        yield path


def pipeline(**options: Any) -> Pipeline:
    quick = Restart(intensity=1000, backoff_s=0.01, backoff_max_s=0.01)
    options = {"fan_out": FAN_OUT, "payload_bytes": PAYLOAD_BYTES, **options}

    def stage(**wiring: Any) -> Stage:
        return Stage(engine="mortal_engines:Mortal", options=options, deterministic=True, restart=quick, **wiring)

    return Pipeline(
        name="mortal",
        stages={
            "first": stage(accepts=("script",), emits="text"),
            "second": stage(inputs=("first",)),
            "third": stage(inputs=("second",), emits="audio"),
        },
        limits=LIMITS,
    )


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int], markers: Path) -> Iterator[SharedSystem]:
    with open_shared_system(lambda: OmniSystem.open(pipeline()), fixture_processes) as shared_system:
        yield shared_system


def dies(at: int, stage: str, where: str) -> tuple[int, str, str, str]:
    """Describe a death of ``stage`` at piece number ``at``, to happen once."""
    return at, stage, where, os.path.join(os.environ["MARKERS"], str(next(_numbers)))


def ask(omni: OmniSystem, *deaths: tuple[int, str, str, str], size: int = 0, **arguments: Any) -> Generation:
    """Submit a request. size: bytes of a tensor in each piece."""
    pieces = [
        Input({"n": n, "dies": [where for at, *where in deaths if at == n]}, {"x": np.zeros(size, np.uint8)})
        for n in range(PIECES)
    ]
    return omni.submit({"script": pieces}, arguments.pop("modalities", ("text", "audio")), **arguments)


async def read(generation: Generation) -> list[Output]:
    with trio.fail_after(WATCHDOG_S):
        return [output async for output in generation]


async def read_and_kill(omni: OmniSystem, generation: Generation, *stages: str) -> list[Output]:
    """Read all outputs, and kill the workers of these stages when the first output has arrived."""
    victims, outputs = [pid_of(omni, stage) for stage in stages], []
    with trio.fail_after(WATCHDOG_S):
        async for output in generation:
            outputs.append(output)
            while victims:
                os.kill(victims.pop(), signal.SIGKILL)
    return outputs


def record_of(generation: Generation) -> Request:
    return generation._stream.request


def check_exact(generation: Generation, outputs: list[Output], replays: int | None = None) -> None:
    number = record_of(generation).number
    assert number is not None
    for stage, of_a_piece in OF_A_PIECE.items():
        mine = [output for output in outputs if output.stage == stage]
        assert [output.data["n"] for output in mine] == [seq // of_a_piece for seq in range(PIECES * of_a_piece)]
        assert [output.finished for output in mine] == [False] * (len(mine) - 1) + [True]
        for seq, output in enumerate(mine):
            assert np.array_equal(output.tensors["payload"].numpy(), payload(number, seq, PAYLOAD_BYTES))
    assert outputs[-1].metrics is not None
    if replays is not None:
        assert outputs[-1].metrics.replays == replays


def pid_of(omni: OmniSystem, stage: str) -> int:
    pid = omni.health().stages[stage][0].pid
    assert pid is not None
    return pid


def generations(omni: OmniSystem) -> dict[str, int]:
    return {stage: replicas[0].generation for stage, replicas in omni.health().stages.items()}


async def all_ready(omni: OmniSystem) -> None:
    with trio.fail_after(WATCHDOG_S):
        while not omni.health().ready:
            await omni.wait_changed()


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(WATCHDOG_S):
        while not condition():  # noqa: ASYNC110 - no event announces the condition
            await trio.sleep(0.002)


# Exact replays


@pytest.mark.parametrize("stage", STAGES)
def test_a_death_at_any_point_changes_no_output(shared_system: SharedSystem, stage: str) -> None:
    """Before the first chunk is fed, between two outputs, and after the last output but before ``Finished``."""

    async def work(omni: OmniSystem) -> None:
        before = generations(omni)
        for deaths, (at, where) in enumerate([(0, "feed"), (2, "after"), (PIECES - 1, "end")], 1):
            generation = ask(omni, dies(at, stage, where))
            # The last of these deaths costs nothing if the consumers have all its output.
            check_exact(generation, await read(generation), None if where == "end" else 1)
            after = {**before, stage: before[stage] + deaths}
            await until(lambda expected=after: generations(omni) == expected)  # no other stage was restarted
            await all_ready(omni)

    shared_system.run(work)


@with_shared_system
async def test_several_stages_that_die_at_once(omni: OmniSystem) -> None:
    for stages in (("second", "third"), STAGES):
        generation = ask(omni)
        check_exact(generation, await read_and_kill(omni, generation, *stages))
        await all_ready(omni)


@with_shared_system
async def test_a_stage_that_dies_twice(omni: OmniSystem) -> None:
    generation = ask(omni, dies(1, "second", "before"), dies(3, "second", "after"))
    check_exact(generation, await read(generation), 2)


@with_shared_system
async def test_all_requests_in_flight_are_exact_and_others_are_not_replayed(omni: OmniSystem) -> None:
    asked = [ask(omni, dies(n, stage, "before")) for n, stage in enumerate(("second", "third", "second"))]
    asked += [ask(omni) for _ in range(5)]
    text_only = ask(omni, modalities=("text",))
    results: dict[str, list[Output]] = {}

    async def reader(generation: Generation) -> None:
        results[generation.request_id] = await read(generation)

    async with trio.open_nursery() as nursery:
        for generation in [*asked, text_only]:
            nursery.start_soon(reader, generation)
    for generation in asked:
        check_exact(generation, results[generation.request_id])
    final = results[text_only.request_id][-1].metrics
    assert final is not None
    assert final.replays == 0
    assert len(results[text_only.request_id]) == PIECES * OF_A_PIECE["first"]


async def test_a_stage_with_all_its_input_does_not_wait_for_dead_sources() -> None:
    """The dead stages do not restart and the request may not be replayed: it needs none of their output."""
    dead = ("first", "second")
    never = {f"stages.{stage}.restart.{name}": NEVER_S for stage in dead for name in ("backoff_s", "backoff_max_s")}
    async with OmniSystem.open(pipeline(), **never, **{"stages.third.options.step_s": 0.01}) as omni:
        generation = ask(omni, on_failure="fail")
        await until(lambda: "second" in record_of(generation).replay_state.stages["third"].inputs_complete)
        for stage in dead:
            os.kill(pid_of(omni, stage), signal.SIGKILL)
        check_exact(generation, await read(generation), 0)


async def test_a_request_completes_without_a_restarted_stage_that_is_not_needed() -> None:
    """The second stage dies while all its output lies in the ring of the stopped third stage, and starts again. Then
    the third stage continues, and the first, which would feed the second once more, stays stopped."""
    async with OmniSystem.open(pipeline(), **{"stages.second.replicas": 2}) as omni:
        first, third = pid_of(omni, "first"), pid_of(omni, "third")
        os.kill(third, signal.SIGSTOP)
        generation = ask(omni)
        record = record_of(generation)
        await until(lambda: {"first", "second"} <= record.stats.keys())
        os.kill(first, signal.SIGSTOP)
        second = omni.health().stages["second"][record.placement["second"].replica].pid
        assert second is not None
        os.kill(second, signal.SIGKILL)
        await until(lambda: record.replay_state.stages["second"].restarted)
        os.kill(third, signal.SIGCONT)
        check_exact(generation, await read(generation), 1)
        os.kill(first, signal.SIGCONT)


async def test_another_replica_takes_over_and_without_one_the_request_waits_until_its_deadline() -> None:
    never = {"stages.second.restart.backoff_s": NEVER_S, "stages.second.restart.backoff_max_s": NEVER_S}
    async with OmniSystem.open(pipeline(), **never, **{"stages.second.replicas": 2}) as omni:
        generation = ask(omni, dies(1, "second", "after"))
        check_exact(generation, await read(generation), 1)
        late, aborted = ask(omni, dies(1, "second", "after"), deadline_s=1.0), ask(omni)
        await until(lambda: omni._orchestrator.queued == 2)
        aborted.abort()
        with pytest.raises(Aborted):
            await read(aborted)
        with pytest.raises(DeadlineExceeded):
            await read(late)
        assert omni.in_flight == 0


async def test_a_join_is_replayed_after_the_death_of_any_of_its_sources() -> None:
    """script -> left -> join -> audio; words -> right -> join; words -> join."""

    def stage(**wiring: Any) -> Stage:
        restart = Restart(intensity=1000, backoff_s=0.01, backoff_max_s=0.01)
        return Stage(engine="echo", options={"fan_out": 2, "step_s": 0.002}, restart=restart, **wiring)

    joined = Pipeline(
        name="join",
        stages={
            "left": stage(accepts=("script",)),
            "right": stage(accepts=("words",)),
            "join": stage(accepts=("words",), inputs=("left", "right"), emits="audio"),
        },
    )
    inputs = {kind: [Input({"text": f"{kind} {n}"}) for n in range(5)] for kind in ("script", "words")}
    async with OmniSystem.open(joined) as omni:
        undisturbed = [output.data for output in await read(omni.submit(inputs, ["audio"]))]
        assert len(undisturbed) == 2 * (5 + 2 * 5 + 2 * 5)
        for stages in (("left",), ("right", "join")):
            outputs = await read_and_kill(omni, omni.submit(inputs, ["audio"]), *stages)
            assert [output.data for output in outputs] == undisturbed
            await all_ready(omni)


# No replay


@with_shared_system
async def test_on_failure_fail_ends_the_request_at_the_death(omni: OmniSystem) -> None:
    with pytest.raises(StageCrashed, match=r"'second'.*SIGKILL") as caught:
        await read(ask(omni, dies(1, "second", "after"), on_failure="fail"))
    assert caught.value.not_replayed is None
    assert not omni.health().ready, "the request ended before the stage was ready again"
    with pytest.raises(InvalidRequest) as refused:
        ask(omni, on_failure="ignore")
    assert refused.value.param == "on_failure"


@with_shared_system
async def test_a_request_whose_chunks_were_evicted_is_not_replayed(omni: OmniSystem) -> None:
    too_large = 300_000
    with pytest.raises(StageCrashed, match=r"stage 'first'.*2000000 bytes.*limits\.retain_bytes") as caught:
        await read(ask(omni, dies(PIECES - 1, "second", "after"), size=too_large))
    assert caught.value.stage == "second"
    assert "retain_bytes" in (caught.value.not_replayed or "")
    await all_ready(omni)
    entry_stage = ask(omni, dies(1, "first", "after"), size=too_large, modalities=("text",))
    assert len(await read(entry_stage)) == PIECES * OF_A_PIECE["first"], "the client keeps its own input"


@with_shared_system
async def test_a_request_that_kills_its_workers_ends_and_the_stage_survives(omni: OmniSystem) -> None:
    before = generations(omni)["second"]
    poison = {"n": 0, "echo": {"stage": "second", "raise": "step"}}
    with pytest.raises(StageCrashed, match="exited with code 1") as caught:
        await read(omni.submit({"script": [Input(poison)]}, ["audio"]))
    assert caught.value.not_replayed == "it was replayed 3 times already (limits.replays)"
    assert caught.value.generation == before + 3
    generation = ask(omni)
    check_exact(generation, await read(generation), 0)


@with_shared_system
async def test_outputs_of_a_replay_that_differs_are_never_spliced(omni: OmniSystem) -> None:
    """Neither by a downstream stage nor by the client's side."""
    for stage in ("second", "third"):
        at, *death = dies(2, stage, "after")
        pieces = [Input({"n": n, "fickle": True, "dies": [death] if n == at else []}) for n in range(PIECES)]
        pids = set()
        with pytest.raises(StageCrashed, match="differs between the original and the replay"):  # noqa: PT012
            with trio.fail_after(WATCHDOG_S):
                async for output in omni.submit({"script": pieces}, ["audio"]):
                    pids.add(output.data["pid"])
        assert len(pids) == 1
        await all_ready(omni)


async def test_a_stage_that_is_not_deterministic_restarts_only_without_output_in_use() -> None:
    not_deterministic = {f"stages.{stage}.deterministic": False for stage in ("first", "third")}
    async with OmniSystem.open(pipeline(), **not_deterministic) as omni:
        with pytest.raises(StageCrashed, match="stage 'first' is not deterministic"):
            await read(ask(omni, dies(1, "first", "after")))
        await all_ready(omni)
        without_output = ask(omni, dies(0, "third", "feed"))
        check_exact(without_output, await read(without_output), 1)


async def test_a_request_that_waits_for_a_stage_ends_with_the_cause_when_the_stage_is_given_up() -> None:
    async with OmniSystem.open(pipeline(), **{"stages.second.restart.intensity": 0}) as omni:
        with pytest.raises(StageUnavailable, match=r"'second'.*SIGKILL.*intensity 0") as caught:
            await read(ask(omni, dies(0, "second", "feed")))
        assert caught.value.cause is omni.dead_error
        assert len(await read(ask(omni, modalities=("text",)))) == PIECES * OF_A_PIECE["first"]


# Resources


@with_shared_system
async def test_retained_chunks_are_freed_however_a_request_ends(omni: OmniSystem) -> None:
    """For each request the first stage retains 0.4 MB and the second stage 0.8 MB."""
    script = {"script": [Input({"n": 0}, {"x": np.zeros(200_000, np.uint8)})]}

    async def done() -> None:
        await read(omni.submit(script, ["audio"]))

    async def aborted() -> None:
        async for _ in omni.submit(script, ["text", "audio"]):
            break  # drops the stream

    async def late() -> None:
        with suppress(DeadlineExceeded):  # a fast machine may complete it
            await read(omni.submit(script, ["audio"], deadline_s=0.005))

    workers = {stage: psutil.Process(pid_of(omni, stage)) for stage in ("first", "second")}
    for end in (done, aborted, late):
        for _ in range(5):
            await end()
        before = {stage: worker.memory_info().rss for stage, worker in workers.items()}
        for _ in range(60):
            await end()
        for stage, worker in workers.items():
            assert worker.memory_info().rss - before[stage] < 15_000_000, (end.__name__, stage)


def test_a_missing_seed_is_drawn_when_the_request_is_admitted() -> None:
    parameters = Parameters(config.load("voice"))
    stages = ("llm", "acoustic", "vocoder")
    drawn = [parameters.by_stage(stages, {}) for _ in range(3)]
    assert len({params["llm"]["seed"] for params in drawn}) == 3
    assert all(isinstance(params["llm"]["seed"], int) for params in drawn)
    assert "seed" not in drawn[0]["acoustic"]
    given = parameters.by_stage(stages, {"seed": 7})
    assert given["llm"]["seed"] == given["vocoder"]["seed"] == 7
