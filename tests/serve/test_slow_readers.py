"""Clients that stop reading: other clients do not wait for them, and they hold little memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import openai
import pytest

from tests.support.http_server import STALLED_WORDS, Server, Start, stalled

WINDOW = 200_000


@pytest.fixture(scope="module")
def server(start: Start) -> Iterator[Server]:
    """None of its readers is too slow, however long a test takes: one ends only for a new request."""
    limits = ("-s", f"limits.window_bytes={WINDOW}", "-s", "limits.max_requests=3", "-s", "limits.read_bytes_s=0.001")
    with start(*limits, "-s", "stages.mouth.options.step_s=0.002") as server:
        yield server
        assert server.stderr == ""


def served(client: openai.OpenAI) -> bool:
    try:
        sound = client.audio.speech.create(model="studio", voice="alloy", input="hello", response_format="wav")
    except openai.RateLimitError:
        return False
    return len(sound.content) > 3200


@pytest.mark.slow
def test_stalled_clients_hold_a_window_and_give_way_to_others(server: Server) -> None:
    with ExitStack() as stack, server.openai() as client:
        for _ in range(3):
            stack.enter_context(stalled(server))
        server.wait_metric("omni_requests_paused", 3)
        assert server.metric("omni_requests_in_flight") == 3
        server.wait(lambda: served(client), "a place to be made")
        assert server.metric('omni_requests_total{outcome="SlowConsumer"}') == 1
        assert WINDOW < server.metric("omni_unread_bytes") < 3 * 2_000_000
    server.wait_metric("omni_unread_bytes", 0)


@pytest.mark.slow
def test_a_client_that_reads_again_gets_everything(server: Server) -> None:
    with stalled(server) as client, client.makefile("rb") as answer:
        server.wait_metric("omni_requests_paused", 1)
        total = sum(iter(lambda: len(answer.read(1 << 16)), 0))
        assert 2 * 1600 * STALLED_WORDS < total < 2.1 * 1600 * STALLED_WORDS
    server.wait_metric("omni_requests_in_flight", 0)
