"""The prefix cache of the thinkers: prompts that begin alike are computed once, and a talker gets the same rows.

``test_adapters`` compares text, codes and sound with the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import pytest

from omni_actors.stages.adapters.options import Adapter
from omni_actors.stages.base import Decisions
from tests.support.adapters import adapter, write_adapter
from tests.support.conformance import exact_chunks
from tests.support.engine_driver import Driver
from tests.support.forwards import record_forwards
from tests.support.omni_questions import STORY, SYSTEM, Ask
from tiny_models import qwen2_5, qwen3

pytestmark = [
    pytest.mark.voice,  # it needs the libraries of the extra; the weights are random
    pytest.mark.usefixtures("clear_choices"),
]

BLOCK = 5
OPTIONS: dict[str, Any] = {"prefill_chunk": BLOCK, "prefix_cache_mb": 1}
LONG = Ask(STORY, SYSTEM)
OTHER = Ask("hello you", SYSTEM)
"""It begins as ``LONG`` does."""
SHOWN = Ask(STORY, SYSTEM, image=((64, 64),))


class Opened(NamedTuple):
    engine: Any
    lora: Adapter


@pytest.fixture(scope="module", params=["qwen3_thinker", "qwen2_5_thinker"])
def opened(
    request: pytest.FixtureRequest, open_stage: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Opened]:
    tiny = qwen3 if request.param == "qwen3_thinker" else qwen2_5
    directory = tiny.save(tmp_path_factory.mktemp("checkpoint"))
    written = write_adapter(
        tmp_path_factory.mktemp("adapter") / "one", directory, ["self_attn.q_proj"], part="thinker.model"
    )
    with closing(open_stage(request.param, directory, **OPTIONS)) as engine:
        yield Opened(engine, adapter(written))


@pytest.fixture
def engine(opened: Opened) -> Any:
    """An engine with an empty cache."""
    opened.engine.call("reset_prefix_cache", {})
    return opened.engine


@pytest.fixture
def driver(engine: Any, drive: Callable[..., Driver]) -> Driver:
    return drive(engine)


def answer(
    driver: Driver, ask: Ask = LONG, journal: tuple[Decisions, ...] = (), *, downstream: bool = True, **params: Any
) -> list[Any]:
    params = {"max_tokens": 6, "ignore_eos": True, **params}
    driver.start(1, journal=journal, downstream=downstream, **params)
    for number, chunk in enumerate(ask.chunks):
        driver.feed(1, *chunk, last=number == len(ask.chunks) - 1)
    outputs: list[Any] = driver.run()[1]
    return outputs


def new_hits(engine: Any, act: Callable[[], object]) -> float:
    """Return how many positions of ``act`` are found in the cache."""
    before = engine.gauges()["prefix_cache_hits"]
    act()
    return float(engine.gauges()["prefix_cache_hits"] - before)


def test_a_prompt_that_begins_alike_gives_the_same_outputs_with_fewer_forwards(
    engine: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards = record_forwards(engine, monkeypatch)
    expected = answer(driver)
    size = expected[-1].data["prompt_tokens"]
    assert sum(forwards) == size + 5
    forwards.clear()
    assert exact_chunks(answer(driver)) == exact_chunks(expected), "every row comes again, output by output"
    found = (size - 1) // BLOCK * BLOCK
    assert sum(forwards) == size - found + 5
    forwards.clear()
    begun = answer(driver, OTHER)
    assert sum(forwards) < begun[-1].data["prompt_tokens"]
    engine.call("reset_prefix_cache", {})
    assert exact_chunks(answer(driver, OTHER)) == exact_chunks(begun)


def test_a_request_that_feeds_a_talker_uses_blocks_with_rows_only(engine: Any, driver: Driver) -> None:
    assert not new_hits(engine, lambda: answer(driver, downstream=False))
    small = engine.gauges()["prefix_cache_bytes"]
    assert new_hits(engine, lambda: answer(driver, downstream=False)), "text alone needs no rows"
    assert engine.gauges()["prefix_cache_bytes"] == small
    assert not new_hits(engine, lambda: answer(driver)), "a talker would miss rows"
    assert engine.gauges()["prefix_cache_bytes"] > small, "rows are counted"
    assert new_hits(engine, lambda: answer(driver))
    assert new_hits(engine, lambda: answer(driver, downstream=False))


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({}, id="greedy", marks=pytest.mark.slow),
        pytest.param({"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2}, id="sampled"),
    ],
)
def test_a_resumed_request_has_the_same_outputs_whatever_the_cache_has(
    engine: Any, driver: Driver, params: dict[str, Any]
) -> None:
    expected = answer(driver, **params)
    decisions = tuple(output.decisions for output in expected)
    assert not decisions[0], "the first output has rows of the prompt only"
    for cut in (0, 1, 3, len(expected) - 1, len(expected)):
        engine.call("reset_prefix_cache", {})
        for _ in range(2):  # as a new incarnation, and as one that has the prompt
            found = answer(driver, LONG, decisions[:cut], **params)
            assert tuple(output.decisions for output in found) == decisions
            assert [(o.data, o.downstream.keys(), o.last) for o in found] == [
                (o.data, o.downstream.keys(), o.last) for o in expected
            ]
            assert exact_chunks(found[:3]) == exact_chunks(expected[:3]), "rows of the prompt"


def test_requests_side_by_side_share_what_was_computed(engine: Any, driver: Driver) -> None:
    prompt_rows = exact_chunks(answer(driver))[:4]
    for number in range(3):
        driver.start(number, max_tokens=4, ignore_eos=True)
        driver.feed(number, *LONG.chunks[0], last=True)
    for outputs in driver.run().values():
        assert exact_chunks(outputs)[:4] == prompt_rows


def test_adapters_do_not_share_blocks(engine: Any, driver: Driver, opened: Opened) -> None:
    plain = exact_chunks(answer(driver))
    assert not new_hits(engine, lambda: answer(driver, lora=opened.lora))
    engine.call("reset_prefix_cache", {})
    adapted = exact_chunks(answer(driver, lora=opened.lora))
    assert new_hits(engine, lambda: answer(driver, lora=opened.lora))
    assert exact_chunks(answer(driver, lora=opened.lora)) == adapted != plain
    assert exact_chunks(answer(driver)) == plain


def test_a_prompt_with_media_is_left_out(engine: Any, driver: Driver) -> None:
    expected = answer(driver, SHOWN)
    assert engine.gauges()["prefix_cache_bytes"] == 0
    answer(driver)
    assert not new_hits(engine, lambda: answer(driver, SHOWN))
    assert exact_chunks(answer(driver, SHOWN)) == exact_chunks(expected)


def test_answers_are_the_same_while_blocks_are_evicted(
    engine: Any, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [exact_chunks(answer(driver, ask)) for ask in (LONG, OTHER)]
    bound = engine.gauges()["prefix_cache_bytes"] // 2
    monkeypatch.setattr(engine._prefixes, "_max_bytes", bound)
    for _ in range(2):
        assert [exact_chunks(answer(driver, ask)) for ask in (LONG, OTHER)] == expected
        assert 0 < engine.gauges()["prefix_cache_bytes"] <= bound
