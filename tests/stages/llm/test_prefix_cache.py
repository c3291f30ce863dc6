"""The prefix cache of the llm engine: prompts that begin alike are computed once, and answers do not depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from omni_actors.stages.adapters.options import Adapter
from omni_actors.stages.autoregressive.prefixes import PrefixCache
from omni_actors.stages.llm.engine import LLMEngine
from tests.stages.llm.tiny_engine import Results, answer, assert_empty, opened, submit
from tests.support.adapters import adapter, save_adapter
from tests.support.forwards import record_forwards

BLOCK = 7
LONG = "the quick brown fox jumps over the lazy dog"


@pytest.fixture
def engine(tiny: Path) -> Iterator[LLMEngine]:
    with closing(opened(tiny, prefix_cache_mb=1)) as engine:
        yield engine
        assert_empty(engine)


def test_a_prompt_that_begins_alike_computes_the_rest_only(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = record_forwards(engine, monkeypatch)
    text, end = answer(engine, LONG, max_tokens=3)
    size = end["prompt_tokens"]
    assert sum(forwards) == size + 2
    forwards.clear()
    assert answer(engine, LONG, max_tokens=3) == (text, end)
    found = (size - 1) // BLOCK * BLOCK
    assert sum(forwards) == size - found + 2
    assert engine.gauges()["prefix_cache_hits"] == found
    forwards.clear()
    _, other = answer(engine, LONG[:20] + "!", max_tokens=1)
    assert BLOCK < other["prompt_tokens"] - sum(forwards) < found


def test_logits_are_the_same_to_the_bit(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    logits: list[Tensor] = []
    forward = engine._forward

    def noted(rows: list[int], count: int) -> Tensor:
        logits.append(forward(rows, count))
        return logits[-1]

    monkeypatch.setattr(engine, "_forward", noted)
    answer(engine, LONG, max_tokens=6)
    first = logits[-6:]
    logits.clear()
    answer(engine, LONG, max_tokens=6)
    assert len(logits) == 6
    for one, other in zip(first, logits, strict=True):
        assert torch.equal(one, other)


def test_requests_of_one_batch_share_what_was_computed(engine: LLMEngine) -> None:
    alone = answer(engine, LONG, max_tokens=5)[0]
    for number in range(5):
        submit(engine, number, LONG, max_tokens=5)
    results = Results().run(engine)
    assert {results.text(number) for number in range(5)} == {alone}


def test_adapters_do_not_share_blocks(engine: LLMEngine, tiny: Path, tmp_path: Path) -> None:
    lora = adapter(save_adapter(AutoModelForCausalLM.from_pretrained(tiny), tmp_path / "one"))
    plain = answer(engine, LONG, max_tokens=5)[0]
    before = engine.gauges()["prefix_cache_hits"]
    adapted = answer(engine, LONG, max_tokens=5, lora=lora)[0]
    assert engine.gauges()["prefix_cache_hits"] == before
    assert answer(engine, LONG, max_tokens=5, lora=lora)[0] == adapted != plain
    assert engine.gauges()["prefix_cache_hits"] > before


def test_a_reset_forgets_all(engine: LLMEngine) -> None:
    answer(engine, LONG, max_tokens=1)
    assert engine.gauges()["prefix_cache_bytes"] > 0
    assert engine.call("reset_prefix_cache", {}) is True
    assert engine.gauges()["prefix_cache_bytes"] == 0
    before = engine.gauges()["prefix_cache_hits"]
    answer(engine, LONG, max_tokens=1)
    assert engine.gauges()["prefix_cache_hits"] == before


def test_it_is_off_by_default(tiny: Path) -> None:
    with closing(opened(tiny)) as engine:
        assert engine.capabilities()["reset_prefix_cache"] == "the option prefix_cache_mb is 0"
        assert engine.gauges() == {}


def block() -> list[tuple[Tensor, Tensor]]:
    """A block of 80 bytes."""
    return [(torch.zeros(2, 5), torch.zeros(2, 5))]


def test_the_least_recently_used_blocks_go_and_the_last_ones_of_a_prompt_first() -> None:
    cache = PrefixCache(2, 3 * 80)
    first, second = cache.keys([1, 2, 3, 4, 5], None), cache.keys([1, 2, 9, 9, 9, 9], None)
    assert (len(first), len(second)) == (2, 3)
    assert first[0] == second[0]
    assert first[0] != cache.keys([1, 2], Adapter("a", "/", "digest"))[0]
    for keys in (first[:1], first, second[:2]):
        cache.add(keys, block())
    assert len(cache.find(first)) == 2
    cache.add(second, block())
    assert [len(cache.find(keys)) for keys in (first, second)] == [1, 3]
    assert cache.gauges() == {"prefix_cache_queries": 14.0, "prefix_cache_hits": 12.0, "prefix_cache_bytes": 240.0}


def test_rows_are_kept_with_a_block_and_counted() -> None:
    cache = PrefixCache(2, 2 * 80 + 8)
    first, second = cache.keys([1, 2, 3, 4], None), cache.keys([5, 6], None)
    cache.add(first[:1], block())
    cache.add(first, block(), torch.zeros(2, 1))
    assert cache.gauges()["prefix_cache_bytes"] == 168
    assert len(cache.find(first)) == 2
    assert cache.find(first, with_rows=True) == [], "the first block has none"
    cache.add(first[:1], block(), torch.zeros(2, 1))
    assert [len(cache.find(first, with_rows=True)), cache.gauges()["prefix_cache_bytes"]] == [1, 88.0]
    cache.add(first[:1], block())
    assert len(cache.find(first, with_rows=True)) == 1, "a block without rows replaces none that has them"
    cache.add(second, block())
    assert cache.gauges()["prefix_cache_bytes"] == 168


def test_a_block_larger_than_the_cache_is_not_kept() -> None:
    cache = PrefixCache(2, 79)
    cache.add(cache.keys([1, 2], None), block())
    assert cache.gauges()["prefix_cache_bytes"] == 0
