"""An engine loop that feeds its engine the whole input of a request at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from omni_actors.protocol.messages import CLIENT, Abort, Bounds, Finished, Refused, Started
from omni_actors.stages.base import Chunk, RequestId
from omni_actors.stages.echo.engine import EchoEngine
from tests.support.engine_loop_harness import LoopHarness, echo, open_harness, receive, send
from tests.support.stage_context import stage_context

REQUEST_BYTES, WORKER_BYTES = 40_000, 60_000


@pytest.fixture
def harness() -> Iterator[LoopHarness]:
    with open_harness(bounds=Bounds(REQUEST_BYTES, WORKER_BYTES), gathers=True) as harness:
        yield harness


class Noting(EchoEngine):
    """Notes what it is fed, the texts of chunks and what is in their tensors, and which requests it has to forget."""

    def __init__(self) -> None:
        super().__init__(stage_context())
        self.fed: list[tuple[str, int]] = []
        self.aborted: list[RequestId] = []

    def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)
        super().abort(request_id)

    def feed(self, request_id: RequestId, chunk: Chunk) -> None:
        sums = [int(tensor.numpy().sum()) for tensor in chunk.tensors.values()]
        self.fed.append((chunk.data["text"], sum(sums)))
        super().feed(request_id, chunk)


def test_the_engine_gets_nothing_before_every_source_has_ended(harness: LoopHarness) -> None:
    client, above, out = harness.input(), harness.input(source="above"), harness.output()
    engine = Noting()
    harness.run(engine)
    harness.start(1, (CLIENT, "above"))
    ones = {"x": np.ones(100, np.uint8)}
    send(above, 1, 0, source="above", text="a", tensors=ones)
    harness.wait_asleep()
    send(client, 1, 0, text="b", last=True)
    harness.wait_asleep()
    assert engine.fed == []
    send(above, 1, 1, source="above", text="c", last=True)
    assert [receive(out).data["text"] for _ in range(3)] == ["b", "a", "c"], "echo begins with its first source"
    assert engine.fed == [("a", 100), ("b", 0), ("c", 0)]


def test_a_ring_that_is_smaller_than_the_input_does_not_fill(harness: LoopHarness) -> None:
    into, out = harness.input(4096), harness.output()
    harness.run(echo())
    harness.start(1)
    for seq in range(10):
        send(into, 1, seq, text=str(seq), tensors={"x": np.zeros(3000, np.uint8)}, last=seq == 9)
    assert [receive(out).data["text"] for _ in range(10)] == [str(seq) for seq in range(10)]


def test_a_request_whose_input_exceeds_its_bound_is_refused_and_others_go_on(harness: LoopHarness) -> None:
    into, out = harness.input(), harness.output()
    engine = Noting()
    harness.run(engine)
    harness.start(1)
    harness.start(2)
    send(into, 2, 0, text="small")
    send(into, 1, 0, text="large", tensors={"x": np.zeros(REQUEST_BYTES, np.uint8)})
    refused = harness.next_message()
    assert isinstance(refused, Refused)
    assert (refused.request, refused.code) == (1, "gathered_input_too_large")
    assert "limits.retain_bytes" in refused.message
    send(into, 1, 1, text="late", last=True)
    send(into, 2, 1, text="last", last=True)
    assert [receive(out).data["text"] for _ in range(2)] == ["small", "last"]
    assert 1 in engine.aborted


def test_the_input_of_all_requests_is_bounded_and_an_abort_frees_its_part(harness: LoopHarness) -> None:
    into, out = harness.input(), harness.output()
    harness.run(echo())
    half = {"x": np.zeros(WORKER_BYTES // 2 - 1000, np.uint8)}
    for request in (1, 2, 3):
        harness.start(request)
    send(into, 1, 0, text="one", tensors=half)
    send(into, 2, 0, text="two", tensors=half)
    send(into, 3, 0, text="three", tensors=half)
    refused = harness.next_message()
    assert isinstance(refused, Refused)
    assert (refused.request, "limits.worker_retain_bytes" in refused.message) == (3, True)
    assert (refused.code, refused.retryable) == ("gathered_input_too_large", True), "others are the reason"
    harness.start(4, replayed=True)
    send(into, 4, 0, text="four", tensors=half, last=True)
    assert receive(out).data["text"] == "four", "it was within the bound where it was"
    assert [type(harness.next_message()) for _ in range(2)] == [Started, Finished]
    harness.post(Abort(1))
    harness.start(5)
    send(into, 5, 0, text="five", tensors=half, last=True)
    assert receive(out).data["text"] == "five"
    assert isinstance(harness.next_message(), Finished)
