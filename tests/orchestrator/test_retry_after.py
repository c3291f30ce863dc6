"""The estimate of when a place is free."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from omni_actors.orchestrator.retry_after import RECENT, SAMPLED, RetryAfterEstimator


def request(work: float = 1.0, *, submitted: float = 0.0, took: float = 0.0, stages: tuple[str, ...] = ("a",)) -> Any:
    route = SimpleNamespace(stages=stages)
    return SimpleNamespace(route=route, work=work, submitted=submitted, finished=submitted + took)


def test_without_experience_the_age_of_the_oldest_request_counts() -> None:
    estimator = RetryAfterEstimator()
    assert estimator.retry_after_s([], 5.0, {}) == 1.0
    assert estimator.retry_after_s([request(), request(submitted=30.0)], 30.0, {}) == pytest.approx(15.0)


def test_one_of_n_requests_ends_in_an_nth_of_the_usual_duration() -> None:
    estimator = RetryAfterEstimator()
    for took in (10.0, 30.0):
        estimator.add(request(submitted=100.0, took=took))
    now = 140.0
    assert estimator.retry_after_s([request(submitted=now)] * 4, now, {}) == pytest.approx(5.0)
    assert estimator.retry_after_s([request(submitted=now)], now, {}) == pytest.approx(20.0)
    assert estimator.retry_after_s([request(submitted=now - 25.0)], now, {}) == pytest.approx(25.0)


def test_requests_in_flight_beyond_the_sample_count_too() -> None:
    estimator = RetryAfterEstimator()
    estimator.add(request(took=20.0 * SAMPLED))
    assert estimator.retry_after_s([request()] * 2 * SAMPLED, 0.0, {}) == pytest.approx(10.0)


def test_more_work_is_expected_to_take_longer() -> None:
    """Pictures of 4 steps took a second each; those in flight have 50."""
    estimator = RetryAfterEstimator()
    for _ in range(RECENT):
        estimator.add(request(4.0, took=1.0))
    assert estimator.retry_after_s([request(50.0)] * 2, 0.0, {}) == pytest.approx(6.25)
    assert estimator.retry_after_s([request(4.0), request(50.0)], 0.0, {}) == pytest.approx(3.375)


def test_routes_have_a_pace_of_their_own() -> None:
    """A picture has millions of pixels, a question counts as 1."""
    estimator = RetryAfterEstimator()
    for _ in range(5):
        estimator.add(request(2.0**20, took=20.0, stages=("denoiser",)))
        estimator.add(request(took=4.0, stages=("llm",)))
    questions, pictures = [request(stages=("llm",))] * 2, [request(2.0**20, stages=("denoiser",))] * 2
    assert estimator.retry_after_s(questions, 0.0, {}) == pytest.approx(2.0)
    assert estimator.retry_after_s(pictures, 0.0, {}) == pytest.approx(10.0)
    assert estimator.retry_after_s(questions + pictures, 0.0, {}) == pytest.approx(3.0)


def test_what_an_engine_measures_counts_in_place_of_the_latest_durations() -> None:
    """A picture of which 5 steps of 4 s are left is done in 20 s, however long the latest ones took."""
    estimator = RetryAfterEstimator()
    estimator.add(request(took=50.0, stages=("encoder", "denoiser")))
    pictures = [request(stages=("encoder", "denoiser"))] * 2
    assert estimator.retry_after_s(pictures, 0.0, {}) == pytest.approx(25.0)
    assert estimator.retry_after_s(pictures, 0.0, {"denoiser": 20.0}) == pytest.approx(20.0)
    assert estimator.retry_after_s(pictures, 0.0, {"denoiser": 30.0, "other": 28.0}) == pytest.approx(28.0)
    estimator.add(request(took=8.0, stages=("llm",)))
    assert estimator.retry_after_s([*pictures, request(stages=("llm",))], 0.0, {"denoiser": 20.0}) == pytest.approx(8.0)
    assert estimator.retry_after_s(pictures, 0.0, {"denoiser": 3600.0}) == 60.0


def test_the_estimate_is_bounded() -> None:
    estimator = RetryAfterEstimator()
    estimator.add(request(took=1e6))
    assert estimator.retry_after_s([request()], 0.0, {}) == 60.0
    assert RetryAfterEstimator().retry_after_s([request()], 0.01, {}) == 1.0
