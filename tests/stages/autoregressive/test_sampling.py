"""Sampling, against transformers' logits processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from omni_actors.stages.autoregressive.sampling import RandomNumbers, Sampler, Sampling, choose, weights
from tests.support.on_gpu import ON_GPU


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([0, 1, 5, 1000]),
    st.sampled_from([0.05, 0.5, 0.9, 1.0]),
)
def test_sampling_weights_are_those_of_transformers(seed: int, temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(seed)) * 3
    warpers = LogitsProcessorList()
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = warpers(torch.zeros(1, 1, dtype=torch.int64), (logits / temperature)[None])[0].softmax(0)
    [ours] = weights(logits[None], Sampling(temperature, top_k, top_p))
    assert (ours > 0).tolist() == (expected > 0).tolist()
    torch.testing.assert_close(ours / ours.sum(), expected)


def test_min_p_excludes_tokens_far_below_the_most_likely_one() -> None:
    logits = torch.tensor([0.5, 0.2, 0.3]).log()
    [found] = weights(logits[None], Sampling(1.0, min_p=0.5))
    torch.testing.assert_close(found / found.sum(), torch.tensor([0.5, 0.0, 0.3]) / 0.8)


def sampler(seed: int | None = None, **sampling: Any) -> Sampler:
    return Sampler(Sampling(**sampling), RandomNumbers(seed))


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.3])
    draw = sampler(temperature=1.0, seed=5)
    drawn = torch.tensor([draw(probabilities.log()) for _ in range(4000)])
    torch.testing.assert_close(drawn.bincount(minlength=4) / 4000, probabilities, rtol=0, atol=0.02)
    assert not (drawn == 1).any()


def test_a_seed_draws_the_same_tokens_when_rounding_swaps_near_ties() -> None:
    logits = torch.zeros(200)
    noisy = logits + torch.linspace(1e-6, -1e-6, 200)
    first, second = sampler(temperature=1.0, seed=-3), sampler(temperature=1.0, seed=-3)
    assert [first(logits) for _ in range(50)] == [second(noisy) for _ in range(50)]


def test_without_a_seed_draws_differ() -> None:
    logits = torch.zeros(1000)
    draws = [[draw(logits) for _ in range(8)] for draw in (sampler(temperature=1.0) for _ in range(2))]
    assert draws[0] != draws[1]


@pytest.mark.parametrize("extreme", [{"temperature": 5e-324}, {"top_p": 5e-324}, {"top_k": 2**40}, {"seed": 2**70}])
def test_extreme_parameters_are_served(extreme: dict[str, Any]) -> None:
    logits = torch.tensor([0.0, 30.0, -1e30])
    assert sampler(**{"temperature": 1.0, **extreme})(logits) == 1


def test_rows_of_a_batch_are_sampled_independently() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0], [9.0, 0.0, 0.0], [0.0, 0.0, 90.0]])
    draw = sampler(temperature=1.0, seed=1)
    assert choose(logits, [None, None, draw]) == [1, 0, 2]
    assert choose(logits[2:], [draw]) == [2]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_penalty_and_suppression_are_those_of_transformers(temperature: float) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(8)) * 3
    seen, suppressed = [3, 7, 7, 41], torch.zeros(50, dtype=torch.bool).index_fill_(0, torch.tensor([1, 7]), True)
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.3), SuppressTokensLogitsProcessor([1, 7], device="cpu")]
    )
    expected = processors(torch.tensor([seen]), logits[None])[0]
    draw = Sampler(Sampling(temperature, repetition_penalty=1.3), RandomNumbers(1), suppressed)
    draw.see(seen)
    if temperature == 0:
        assert draw(logits) == expected.argmax()
    else:
        torch.testing.assert_close(draw.allowed(logits), expected)
        assert not {1, 7} & {draw(logits) for _ in range(100)}


def test_chosen_tokens_count_for_the_penalty() -> None:
    logits = torch.tensor([1.0, 1.5, 0.0])
    assert [Sampler(Sampling(0.0, repetition_penalty=2.0), RandomNumbers(1))(logits) for _ in range(2)] == [1, 1]
    draw = Sampler(Sampling(0.0, repetition_penalty=2.0), RandomNumbers(1))
    assert [draw(logits) for _ in range(3)] == [1, 0, 1], "1.5 / 2 is less than 1, and more than 1 / 2"


def test_an_end_token_beyond_the_models_vocabulary_needs_no_suppression() -> None:
    found = sampler(0, min_tokens=1)
    found.end_tokens = frozenset({1, 9})
    assert found.allowed(torch.tensor([0.0, 1.0, 0.5])).tolist() == [0.0, float("-inf"), 0.5]


def test_the_nth_random_number_depends_on_seed_and_n_alone() -> None:
    one, other = RandomNumbers(5), RandomNumbers(5)
    numbers = [one.next() for _ in range(1000)]
    other.skip(600)
    assert [other.next() for _ in range(400)] == numbers[600:]
    assert RandomNumbers(6).next() != numbers[0]
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 1000 - 0.5) < 0.05


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_sampler_that_replays_goes_on_as_if_it_had_chosen(temperature: float) -> None:
    rows = torch.randn(20, 50, generator=torch.Generator().manual_seed(3))
    terms: dict[str, Any] = {"temperature": temperature, "repetition_penalty": 2.0, "min_tokens": 12, "seed": 4}
    first, second = sampler(**terms), sampler(**terms)
    for each in (first, second):
        each.end_tokens = frozenset(range(25))
    expected = [first(row) for row in rows]
    for token in expected[:10]:
        assert token is not None
        second.replay(token)
    assert [second(row) for row in rows[10:]] == expected[10:]


def test_a_bias_is_added_to_the_logits() -> None:
    draw = Sampler(Sampling(), RandomNumbers(1), bias={2: 5.0, 0: -100.0, 99: 1.0})
    torch.testing.assert_close(draw.allowed(torch.tensor([200.0, 1.0, 2.0])), torch.tensor([100.0, 1.0, 7.0]))


def test_count_penalties_grow_with_the_answer_and_not_with_the_prompt() -> None:
    draw = sampler(presence_penalty=0.5, frequency_penalty=0.25)
    draw.see([0, 1, 2])
    logits = torch.tensor([4.0, 3.0, 2.0])
    torch.testing.assert_close(draw.allowed(logits), logits)
    assert [draw(logits) for _ in range(4)] == [0, 0, 0, 1]
    torch.testing.assert_close(draw.allowed(logits), logits - torch.tensor([1.25, 0.75, 0.0]))


class Odd:
    """A structure that excludes the even tokens."""

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        even = torch.arange(len(logits)) % 2 == 0
        return logits.masked_fill(even.to(logits.device), float("-inf"))

    def accept(self, token: int) -> None:
        assert token % 2, "it is excluded"


EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.4,
    "min_tokens": 40,
    "min_p": 0.001,
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize(
    "how", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95}, {"temperature": 1.1, "top_k": 50, "top_p": 0.9}]
)
def test_tokens_are_chosen_where_the_logits_are(device: str, how: dict[str, Any]) -> None:
    """With every parameter: they are those of the same logits on the host, and a row without a choice has none."""
    size, rows, steps = 5000, 4, 30
    suppressed = torch.arange(size) % 7 == 0

    def made(seed: int) -> Sampler:
        each = Sampler(Sampling(**EVERYTHING, **how), RandomNumbers(seed), suppressed, {3: 9.0, 11: -4.0})
        each.end_tokens = frozenset({1, 5})
        each.see([9, 17])
        if seed % 2:
            each.structure = Odd()
        return each

    theirs, ours = ([made(seed) for seed in range(rows)] for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        logits = torch.randn(rows + 1, size, generator=generator) * 4
        logits[rows] = float("-inf")
        expected = choose(logits, [*theirs, made(0)])
        assert choose(logits.to(device), [*ours, made(0)]) == expected
        assert expected[rows] is None
        assert None not in expected[:rows]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_no_excluded_token_is_drawn_from_a_large_vocabulary(device: str) -> None:
    """Wherever the draw falls, also on the borders of the sum's blocks."""
    size = 151_936
    logits = torch.full((1, size), float("-inf"), device=device)
    logits[0, ::3] = torch.linspace(-3, 3, len(range(0, size, 3)), device=device)
    draw = sampler(temperature=1.0, seed=4)
    assert all(token is not None and token % 3 == 0 for token in (choose(logits, [draw])[0] for _ in range(200)))
