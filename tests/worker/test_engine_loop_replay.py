"""An engine loop's part in a replay: the outputs that it retains and sends again, the chunks that it drops."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from omni_actors.protocol.chunks import OVERHEAD_BYTES
from omni_actors.protocol.messages import (
    CLIENT,
    CLIENT_ADDRESS,
    Abort,
    Address,
    Bounds,
    Finished,
    InputComplete,
    Resend,
    Started,
    Unreplayable,
)
from omni_actors.stages.base import StageOutput, StageRequest
from omni_actors.stages.echo.engine import EchoEngine
from ringbuf import Consumer
from tests.support.engine_loop_harness import LoopHarness, echo, open_harness, receive, send
from tests.support.stage_context import stage_context

BELOW, BELOW_1 = Address("below", 0), Address("below", 1)
PLENTY = 1 << 20


def texts(out: Consumer, count: int) -> list[tuple[int, str]]:
    chunks = [receive(out) for _ in range(count)]
    return [(chunk.seq, chunk.data["text"]) for chunk in chunks]


# sending again


@pytest.mark.parametrize("again_at", [BELOW, BELOW_1], ids=["the same replica", "another replica"])
def test_a_new_consumer_gets_nothing_of_a_running_request_until_resend_then_all(
    harness: LoopHarness, again_at: Address
) -> None:
    into, out = harness.input(), harness.output(target=BELOW)
    harness.run(echo())
    harness.start(1, targets=(BELOW,), retained=True)
    send(into, 1, 0, text="a")
    assert texts(out, 1) == [(0, "a")]
    out.close()  # the consumer died
    again = harness.output(target=again_at)
    send(into, 1, 1, text="b")
    harness.wait_asleep()
    assert again.try_recv() is None
    harness.post(Resend(1, again_at))
    assert texts(again, 2) == [(0, "a"), (1, "b")]
    send(into, 1, 2, text="c", last=True)
    assert texts(again, 1) == [(2, "c")]
    finished = harness.next_message()
    assert isinstance(finished, Finished)
    assert finished.stats.sent_bytes[str(again_at)] > 0


def test_a_request_that_starts_later_is_sent_to_the_new_consumer_at_once(harness: LoopHarness) -> None:
    into, _ = harness.input(), harness.output(target=BELOW)
    harness.run(echo())
    harness.start(1, targets=(BELOW,), retained=True)
    again = harness.output(target=BELOW)
    harness.start(2, targets=(BELOW,), retained=True)
    send(into, 1, 0, text="cut off", last=True)
    send(into, 2, 0, text="flows", last=True)
    assert texts(again, 1) == [(0, "flows")]
    harness.post(Resend(1, BELOW))
    assert texts(again, 1) == [(0, "cut off")]


def test_a_resend_does_not_affect_another_target_of_the_request(harness: LoopHarness) -> None:
    into, client, _ = harness.input(), harness.output(), harness.output(target=BELOW)
    harness.run(echo())
    harness.start(1, targets=(CLIENT_ADDRESS, BELOW), retained=True)
    send(into, 1, 0, text="a")
    again = harness.output(target=BELOW)
    harness.wait_asleep()
    harness.post(Resend(1, BELOW))
    send(into, 1, 1, text="b", last=True)
    assert texts(again, 2) == texts(client, 2) == [(0, "a"), (1, "b")]
    assert client.try_recv() is None


def test_a_finished_request_can_be_sent_again_until_it_has_ended(harness: LoopHarness) -> None:
    into, out = harness.input(), harness.output(4096, target=BELOW)
    harness.run(echo(fan_out=100, payload_bytes=1000))
    harness.start(1, targets=(BELOW,), retained=True)
    send(into, 1, 0, last=True)
    first = [receive(out) for _ in range(100)]
    assert isinstance(harness.next_message(), Finished)
    for _ in range(2):
        harness.post(Resend(1, BELOW))
        assert [receive(out) for _ in range(100)] == first
    harness.post(Resend(1, BELOW))
    harness.wait_asleep()  # most of it waits for room
    harness.post(Abort(1))
    harness.wait_asleep()
    assert not harness.loop._retention.requests
    assert len(list(_drain(out))) < 100


class RememberingEcho(EchoEngine):
    """Outputs arrays of its own, and keeps weak references to them."""

    def __init__(self) -> None:
        super().__init__(stage_context())
        self.given: list[weakref.ref[Any]] = []

    def _output(self, request_id: int) -> Any:
        output = super()._output(request_id)
        assert isinstance(output, StageOutput)
        array = np.zeros(1000, np.uint8)
        self.given.append(weakref.ref(array))
        return StageOutput(request_id, {"array": array}, output.data, output.last)


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("retain_bytes", [0, 1, PLENTY])
def test_outputs_are_kept_only_within_the_bound_and_until_the_end(retain_bytes: int, finished: bool) -> None:
    engine = RememberingEcho()
    with open_harness(bounds=Bounds(retain_bytes, PLENTY)) as harness:
        into, out = harness.input(), harness.output(target=BELOW)
        harness.run(engine)
        harness.start(1, targets=(BELOW,), retained=bool(retain_bytes))
        for seq in range(3):
            send(into, 1, seq, last=finished and seq == 2)
            receive(out)
        harness.wait_asleep()
        assert sum(ref() is not None for ref in engine.given) == (3 if retain_bytes == PLENTY else 0)
        harness.post(Abort(1))
        harness.wait_asleep()
        assert not any(ref() is not None for ref in engine.given)
        assert not harness.loop._retention.requests


@pytest.mark.parametrize("payload_bytes", [0, 100_000])
def test_a_request_past_its_bound_is_evicted_and_reported_once_and_when_needed(payload_bytes: int) -> None:
    limit = 2 * payload_bytes + 3 * OVERHEAD_BYTES
    with open_harness(bounds=Bounds(limit, PLENTY)) as harness:
        into, out = harness.input(), harness.output(target=BELOW)
        harness.run(echo(payload_bytes=payload_bytes))
        harness.start(1, targets=(BELOW,), retained=True)
        for seq in range(8):
            send(into, 1, seq, text="x", last=seq == 7)
            assert texts(out, 1) == [(seq, "x")], "eviction does not affect new outputs"
        notice = harness.next_message()
        assert isinstance(notice, Unreplayable)
        assert (notice.request, notice.needed) == (1, False)
        assert f"{limit} bytes" in notice.reason
        assert "limits.retain_bytes" in notice.reason
        assert isinstance(harness.next_message(), Finished)
        harness.post(Resend(1, BELOW))
        assert harness.next_message() == Unreplayable(1, notice.reason, needed=True)
        assert out.try_recv() is None


def test_past_the_worker_s_bound_only_the_largest_request_is_evicted() -> None:
    with open_harness(bounds=Bounds(PLENTY, 60_000)) as harness:
        into, out = harness.input(), harness.output(target=BELOW)
        harness.run(echo(payload_bytes=10_000))
        for request in (1, 2, 3):
            harness.start(request, targets=(BELOW,), retained=True)
        for request, seq in ((1, 0), (2, 0), (2, 1), (2, 2), (1, 1)):
            send(into, request, seq, text="x")
            receive(out)
        harness.wait_asleep()
        assert harness.messages.empty()
        send(into, 3, 0, text="x")
        notice = harness.next_message()
        assert isinstance(notice, Unreplayable)
        assert (notice.request, notice.needed) == (2, False)
        assert "60000 bytes" in notice.reason
        assert "limits.worker_retain_bytes" in notice.reason
        receive(out)
        send(into, 2, 3, text="x")  # an evicted request stays evicted, and no longer counts
        receive(out)
        for request, seqs in ((1, [0, 1]), (3, [0])):
            harness.post(Resend(request, BELOW))
            assert [receive(out).seq for _ in seqs] == seqs
        harness.post(Abort(1), Resend(2, BELOW))
        assert harness.next_message() == Unreplayable(2, notice.reason, needed=True)
        harness.wait_asleep()
        assert harness.loop._retention.requests == {2, 3}


def test_a_resend_of_a_request_that_was_not_retained_is_unreplayable(harness: LoopHarness) -> None:
    into, out = harness.input(), harness.output(target=BELOW)
    harness.run(echo())
    harness.start(1, targets=(BELOW,))
    send(into, 1, 0, text="x")
    assert texts(out, 1) == [(0, "x")]
    harness.post(Resend(1, BELOW))
    notice = harness.next_message()
    assert isinstance(notice, Unreplayable)
    assert notice.needed


# receiving again


def test_replayed_chunks_are_dropped_and_later_ones_accepted(harness: LoopHarness) -> None:
    into, out = harness.input(source="above"), harness.output()
    harness.run(echo(fan_out=2))  # one output a turn: the request does not finish in the turn that it gets "d"
    harness.start(1, ("above",))
    for seq, text in enumerate("ab"):
        send(into, 1, seq, source="above", text=text)
    again = harness.input(source="above")
    for seq, text in enumerate("abcd"):
        send(again, 1, seq, source="above", text=text, last=text == "d")
    assert texts(out, 8) == list(enumerate("aabbccdd"))
    assert harness.next_message() == InputComplete(1, "above")
    assert isinstance(harness.next_message(), Finished)
    harness.wait_asleep()
    assert out.try_recv() is None


def test_input_complete_is_sent_once_for_each_upstream_stage(harness: LoopHarness) -> None:
    """Not for the client, which ends with the system."""
    left, right, client, end = (harness.input(source=source) for source in ("left", "right", CLIENT, "end"))
    out = harness.output()
    harness.run(echo())
    harness.start(1, ("left", "right", CLIENT, "end"), retained=True)
    send(left, 1, 0, source="left", text="a", last=True)
    assert harness.next_message() == InputComplete(1, "left")
    send(harness.input(source="left"), 1, 0, source="left", text="a", last=True)  # replayed for another stage
    send(client, 1, 0, text="b", last=True)
    harness.wait_asleep()
    assert harness.messages.empty()
    send(right, 1, 0, source="right", text="c")
    send(right, 1, 1, source="right", text="d", last=True)
    assert harness.next_message() == InputComplete(1, "right")
    send(end, 1, 0, source="end", text="e", last=True)
    if (message := harness.next_message()) == InputComplete(1, "end"):  # not if it finishes in the same turn
        message = harness.next_message()
    assert isinstance(message, Finished)
    assert sorted(text for _, text in texts(out, 5)) == ["a", "b", "c", "d", "e"]  # those of one source in order


@pytest.mark.parametrize(
    "difference", [{"text": "other"}, {"tensors": {"x": np.r_[np.zeros(9999), 1]}}, {"last": True}], ids=str
)
def test_a_replayed_chunk_that_differs_ends_the_replay_only(harness: LoopHarness, difference: dict[str, Any]) -> None:
    into, out = harness.input(source="above"), harness.output()
    harness.run(echo())
    harness.start(1, ("above",))
    harness.start(2, ("above",))
    same = {"text": "same", "tensors": {"x": np.zeros(10_000)}}
    send(into, 1, 0, source="above", **same)
    assert texts(out, 1) == [(0, "same")]
    again = harness.input(source="above")
    send(again, 1, 0, source="above", **(same | difference))
    notice = harness.next_message()
    assert isinstance(notice, Unreplayable)
    assert (notice.request, notice.needed) == (1, True)
    assert "differs" in notice.reason
    send(again, 1, 1, source="above", text="of another answer")
    send(again, 2, 0, source="above", text="fine", last=True)
    assert texts(out, 1) == [(0, "fine")]


def test_a_replayed_start_is_acknowledged_and_accepts_no_earlier_chunk(harness: LoopHarness) -> None:
    """Its number is below the newest. For other requests, stale chunks stay stale and early ones wait."""
    into, out = harness.input(), harness.output()
    harness.loop._newest = 5
    harness.run(echo())
    send(into, 3, 0, text="stale")
    harness.wait_asleep()
    harness.start(3, replayed=True)
    assert harness.next_message() == Started(3)
    send(into, 4, 0, text="stale too")
    send(into, 3, 0, text="three", last=True)
    assert texts(out, 1) == [(0, "three")]
    send(into, 6, 0, text="early", last=True)
    harness.wait_asleep()
    assert out.try_recv() is None
    harness.start(6)
    assert texts(out, 1) == [(0, "early")]


class SourceRecorder(EchoEngine):
    def start(self, request: StageRequest) -> None:
        super().start(request)
        self.sources = request.sources


def test_a_first_start_is_not_acknowledged(harness: LoopHarness) -> None:
    engine = SourceRecorder(stage_context())
    harness.run(engine)
    harness.start(1, (CLIENT, "above"))
    harness.wait_asleep()
    assert engine.sources == (CLIENT, "above")
    assert harness.messages.empty()


def _drain(out: Consumer) -> Iterator[int]:
    while (frame := out.try_recv()) is not None:
        with frame:
            yield 1
