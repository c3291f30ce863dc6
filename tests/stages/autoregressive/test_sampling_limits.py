"""Sampling at its limits: any logits, all parameters that a request may have, every dtype of a model."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.stages.autoregressive.options import TextParams
from omni_actors.stages.autoregressive.sampling import RandomNumbers, Sampler, Sampling, choose

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXTREMES = (0.0, -0.0, 1.0, -1.0, 1e-45, 6e4, -6e4, 3.3e38, -3.3e38, -math.inf)
ROWS = st.lists(st.sampled_from(EXTREMES), min_size=6, max_size=6)
SAMPLING = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 5e-324, 1e-45, 1e-4, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 3, 2**31 - 1]),
    top_p=st.sampled_from([5e-324, 1e-45, 1e-7, 0.5, 1 - 2**-53, 1.0]),
    repetition_penalty=st.sampled_from([0.1, 1.0, 10.0]),
)


def chosen(logits: torch.Tensor, sampling: list[Sampling], seen: list[int]) -> list[int | None]:
    samplers = [Sampler(each, RandomNumbers(7)) for each in sampling]
    for sampler in samplers:
        sampler.see(seen)
    return choose(logits, samplers)


@given(
    rows=st.lists(ROWS, min_size=3, max_size=3),
    sampling=st.lists(SAMPLING, min_size=3, max_size=3),
    seen=st.lists(st.integers(0, 5)),
    dtype=st.sampled_from(DTYPES),
)
def test_any_row_gives_an_allowed_token_or_none_if_no_token_is_allowed(
    rows: list[list[float]], sampling: list[Sampling], seen: list[int], dtype: torch.dtype
) -> None:
    logits = torch.tensor(rows).to(dtype)
    tokens = chosen(logits, sampling, seen)
    for row, token, each in zip(logits, tokens, sampling, strict=True):
        usable = math.isfinite(row.max())
        assert (token is not None) == usable
        assert token is None or row[token] > -math.inf
        assert [token] == chosen(row[None], [each], seen)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("greedy", [False, True])
def test_a_row_that_is_not_finite_gives_none_and_changes_no_other(bad: float, dtype: torch.dtype, greedy: bool) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
    broken = logits.clone()
    broken[1, 7] = bad

    def draw(rows: Any) -> list[int | None]:
        return choose(rows, [None if greedy else Sampler(Sampling(1.0, top_p=0.9), RandomNumbers(3)) for _ in rows])

    first, _, last = draw(logits)
    assert draw(broken) == [first, None, last]


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("temperature", (0.0, 5e-324, 2.0), (-5e-324, 2.1, math.nan)),
        ("top_k", (-1, 0, 2**31 - 1), (-2, 2**31, 2**63)),
        ("top_p", (5e-324, 1.0), (0.0, 1.1, math.nan)),
        ("repetition_penalty", (0.1, 10.0), (1e-38, 11.0, math.nan)),
        ("seed", (-(2**63), 2**63 - 1), (-(2**63) - 1, 2**63, 2**80)),
        ("max_tokens", (1, 1_000_000), (0, 2**63)),
    ],
)
def test_request_parameters_have_bounds(name: str, accepted: tuple[float, ...], refused: tuple[float, ...]) -> None:
    for value in accepted:
        msgspec.convert({name: value}, TextParams)
    for value in refused:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({name: value}, TextParams)


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
def test_every_accepted_seed_draws(seed: int) -> None:
    assert 0 <= Sampler(Sampling(1.0), RandomNumbers(seed)).draw() < 1


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.5}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_tokens_are_all_excluded_gives_none_and_changes_no_other(
    limits: dict[str, float], temperature: float
) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    nothing = torch.ones(50, dtype=torch.bool)

    def draw(suppressed: torch.Tensor | None) -> list[int | None]:
        sampling = msgspec.convert({"temperature": temperature, "repetition_penalty": 1.1, **limits}, Sampling)
        return choose(logits, [Sampler(sampling, RandomNumbers(3), each) for each in (None, suppressed, None)])

    first, _, last = draw(None)
    assert draw(nothing) == [first, None, last]
    excluded = Sampler(Sampling(1.0, top_p=0.5), RandomNumbers(3), nothing)
    assert choose(logits[:1], [excluded]) == [None]
    assert choose(logits[:2], [None, excluded]) == [logits[0].argmax(), None]
