"""The rules of ``stages.base`` as tests that every engine passes."""

from __future__ import annotations

import gc
from collections import Counter
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.registry import ENGINES
from tests.support.closeness import assert_same_results
from tests.support.engine_cases import Case
from tests.support.engine_driver import for_stages


def _slow(value: Any, name: str) -> Any:
    return pytest.param(value, id=name, marks=pytest.mark.slow)


class EngineConformance:
    """A subclass runs with the fixtures ``case`` and ``driver`` of its module."""

    def test_a_request_gives_its_outputs_and_exactly_one_last(self, case: Case, driver: Any) -> None:
        case.start(driver, 1)
        case.feed(driver, 1, 0)
        outputs = driver.run()
        assert outputs.keys() == {1}
        assert [output.last for output in outputs[1]].count(True) == 1
        assert outputs[1][-1].last
        assert not driver.live

    def test_an_engine_without_work_is_not_busy(self, case: Case, driver: Any) -> None:
        assert not driver.engine.busy
        case.start(driver, 1)
        assert not driver.engine.busy, "busy with a request that has no input yet"
        case.feed(driver, 1, 0)
        assert driver.engine.busy
        driver.run()
        assert not driver.engine.busy

    def test_requests_side_by_side_give_what_each_gives_alone(self, case: Case, driver: Any) -> None:
        for number in (0, 1):
            case.start(driver, 10 + number)
        for i in range(max(map(len, case.inputs))):
            for number in (0, 1):
                case.feed(driver, 10 + number, number, slice(i, i + 1))
        outputs = driver.run()
        assert outputs.keys() == {10, 11}
        for number in (0, 1):
            case.check(driver, outputs[10 + number], number)

    def test_a_request_that_joins_between_steps_gives_what_it_gives_alone(self, case: Case, driver: Any) -> None:
        case.start(driver, 10)
        case.feed(driver, 10, 0)
        outputs = {10: driver.step(), 11: []}
        case.start(driver, 11)
        case.feed(driver, 11, 1)
        for request_id, more in driver.run().items():
            outputs[request_id] += more
        for number in (0, 1):
            case.check(driver, outputs[10 + number], number)

    def test_an_id_can_be_used_again_after_its_end(self, case: Case, driver: Any) -> None:
        for _ in range(2):
            case.start(driver, 1)
            case.feed(driver, 1, 0)
            case.check(driver, driver.run()[1], 0)

    def test_a_deterministic_engine_gives_the_same_chunks_whatever_the_timing(self, case: Case, driver: Any) -> None:
        """After a replay, a consumer goes on with the chunk that follows the last one that it has."""
        spec = ENGINES[case.name]
        assert spec.deterministic or spec.resumable, "this suite is for engines whose requests survive a death"

        def at_once() -> list[Any]:
            case.start(driver, 1)
            case.feed(driver, 1, 0)
            return driver.run()[1]

        def chunk_by_chunk() -> list[Any]:
            outputs: list[Any] = []
            case.start(driver, 1)
            for i in range(len(case.inputs[0])):
                case.feed(driver, 1, 0, slice(i, i + 1))
                outputs += driver.run().get(1, [])
            return outputs

        def beside_another() -> list[Any]:
            case.start(driver, 2)
            case.feed(driver, 2, 1)
            return at_once()

        expected = at_once()
        # Alone in its batch, a request takes the same forwards again, and a machine repeats those to the bit.
        assert exact_chunks(chunk_by_chunk()) == exact_chunks(expected)
        assert_same_results(chunks(beside_another()), chunks(expected))

    @pytest.mark.parametrize("alone", [_slow(True, "alone"), pytest.param(False, id="beside another")])
    @pytest.mark.parametrize(
        "share",
        [
            *(pytest.param(0, id="none"), _slow(0.01, "one"), pytest.param(0.5, id="half")),
            *(_slow(0.99, "all but one"), pytest.param(1, id="all")),
        ],
    )
    def test_a_resumable_engine_goes_on_behind_its_journal(
        self, case: Case, driver: Any, share: float, alone: bool
    ) -> None:
        """It puts the outputs of the journal out again, and then those that it would have put out without a death."""
        if not ENGINES[case.name].resumable:
            pytest.skip("the engine is not resumable")
        expected = case.outputs(driver, 0)
        size = {0.01: 1, 0.99: len(expected) - 1}.get(share, int(share * len(expected)))
        journal = tuple(output.decisions for output in expected[:size])
        for needed_from in {0, size}:
            if not alone:
                case.start(driver, 2)
                case.feed(driver, 2, 1, slice(0, 1))
            case.start(driver, 1, journal=journal, needed_from=needed_from)
            if not alone:
                case.feed(driver, 2, 1, slice(1, None))
            for i in range(len(case.inputs[0])):
                case.feed(driver, 1, 0, slice(i, i + 1))
            outputs = driver.run()
            assert [output.decisions for output in outputs[1]] == [output.decisions for output in expected]
            assert_same_results(chunks(outputs[1][needed_from:]), chunks(expected[needed_from:]))
            for found, whole in zip(outputs[1][:needed_from], expected, strict=False):
                if not found.partial:
                    assert_same_results(chunks([found]), chunks([whole]))
            assert not any(output.partial for output in outputs[1][needed_from:])
            if not alone:
                case.check(driver, outputs[2], 1)

    @pytest.mark.parametrize("steps", [0, 1, 2, 3])
    def test_abort_frees_a_request_with_a_journal(self, case: Case, driver: Any, steps: int) -> None:
        if not ENGINES[case.name].resumable:
            pytest.skip("the engine is not resumable")
        journal = tuple(output.decisions for output in case.outputs(driver, 0)[:-1])
        case.start(driver, 2, journal=journal)
        case.feed(driver, 2, 0)
        case.start(driver, 3)
        case.feed(driver, 3, 1)
        outputs = [output for _ in range(steps) if driver.engine.busy for output in driver.step()]
        driver.abort(2)
        outputs += driver.run().get(3, [])
        case.check(driver, [output for output in outputs if output.request_id == 3], 1)
        assert not driver.engine.busy

    @pytest.mark.parametrize("state", ["started", "half fed", "half fed and stepped", "fed", "stepped"])
    def test_abort_frees_a_request_in_every_state(self, case: Case, driver: Any, state: str) -> None:
        case.start(driver, 2)
        if state.startswith("half fed"):
            case.feed(driver, 2, 0, slice(0, 1))
            if "stepped" in state:
                driver.run()
        elif state != "started":
            case.feed(driver, 2, 0)
            if state == "stepped":
                assert not any(output.last for output in driver.step())
        case.start(driver, 3)
        case.feed(driver, 3, 1)
        driver.abort(2)
        outputs = driver.run()
        assert outputs.keys() == {3}
        case.check(driver, outputs[3], 1)
        assert not driver.engine.busy
        case.start(driver, 2)
        driver.abort(2)

    @pytest.mark.parametrize("fed_before", [0, 1])
    def test_a_bad_chunk_refuses_its_own_request_only(self, case: Case, driver: Any, fed_before: int) -> None:
        case.start(driver, 2)
        case.start(driver, 3)
        case.feed(driver, 2, 0, slice(0, fed_before))
        case.feed(driver, 3, 1, slice(0, 1))
        with pytest.raises(InvalidRequest) as refusal:
            driver.feed(2, *case.refused, last=True, source=case.source)
        assert refusal.value.param
        driver.abort(2)  # as the worker does: it may come too late for anything
        case.feed(driver, 3, 1, slice(1, None))
        outputs = driver.run()
        assert outputs.keys() == {3}
        case.check(driver, outputs[3], 1)
        case.start(driver, 2)
        driver.abort(2)

    def test_nothing_is_kept_of_a_request_that_has_ended(self, case: Case, driver: Any) -> None:
        def one_of_each_end(request_id: int) -> None:
            case.alone(driver, request_id, 0)
            case.start(driver, request_id + 1)
            with pytest.raises(InvalidRequest):
                driver.feed(request_id + 1, *case.refused, last=True, source=case.source)
            driver.live.discard(request_id + 1)
            case.start(driver, request_id + 2)
            case.feed(driver, request_id + 2, 0)
            driver.abort(request_id + 2)

        one_of_each_end(10)  # what is loaded by a first request stays
        before = reachable(driver.engine)
        one_of_each_end(20)
        assert reachable(driver.engine) == before


def reachable(engine: Any) -> Counter[str]:
    """How many objects of each type the engine holds, directly or not; code and modules aside.

    Numbers are counted per reference, because equal ones may share an object. The media reader's pending work is
    completed first, because aborting a request does not stop it.
    """
    if reader := getattr(engine, "_media_thread", None):
        reader.submit(int).result()
    numbers, seen = 0, dict[int, Any]()
    found = [engine]
    while found:
        thing = found.pop()
        if isinstance(thing, (int, float)):
            numbers += 1
        elif id(thing) not in seen and not isinstance(thing, (type, ModuleType, FunctionType)):
            seen[id(thing)] = thing
            found += gc.get_referents(thing)
    return Counter(type(thing).__name__ for thing in seen.values()) + Counter(int=numbers)


def chunks(outputs: list[Any]) -> list[Any]:
    """What a consumer receives, chunk by chunk."""
    return [(dict(o.data), {name: _array(t) for name, t in for_stages(o).items()}, o.last) for o in outputs]


def exact_chunks(outputs: list[Any]) -> list[Any]:
    """What a consumer receives, chunk by chunk, with tensors as bytes."""
    return [
        (data, {n: (t.dtype, t.shape, t.tobytes()) for n, t in tensors.items()}, last)
        for data, tensors, last in chunks(outputs)
    ]


def _array(tensor: Any) -> np.ndarray[Any, Any]:
    return tensor if isinstance(tensor, np.ndarray) else tensor.numpy()  # type: ignore[no-any-return]
