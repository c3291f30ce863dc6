"""The engine loop in a thread of this process, with real rings and the echo engine."""

from __future__ import annotations

import selectors
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest

import ringbuf
from omni_actors.protocol import chunks
from omni_actors.protocol.chunks import ChunkCorrupted
from omni_actors.protocol.messages import (
    CLIENT_ADDRESS,
    Abort,
    Address,
    Call,
    CallAnswer,
    Finished,
    Pause,
    Ping,
    Pong,
    Refused,
    Resume,
    Stop,
)
from omni_actors.protocol.messages import encode as encode_message
from omni_actors.stages.base import Chunk, InvalidRequest, StageFailure, StageOutput, StageRequest, TemporarilyRefused
from omni_actors.stages.echo.engine import EchoEngine
from omni_actors.worker.engine_loop import RECEIVE_BYTES
from omni_actors.worker.outgoing import encode
from ringbuf import RingClosed
from tests.support.engine_loop_harness import WATCHDOG_S, LoopHarness, echo, receive, send
from tests.support.stage_context import stage_context

BELOW, GONE = Address("below", 0), Address("below", 1)


def test_chunks_pass_in_order_and_finished_is_sent_after_the_last(harness: LoopHarness) -> None:
    into, out = harness.input(), harness.output()
    harness.run(echo(fan_out=2))
    harness.start(1)
    send(into, 1, 0, text="a")
    send(into, 1, 1, text="b", last=True)
    got = [receive(out) for _ in range(4)]
    assert [(chunk.seq, chunk.data["text"], chunk.last) for chunk in got] == [
        (0, "a", False),
        (1, "a", False),
        (2, "b", False),
        (3, "b", True),
    ]
    finished = harness.next_message()
    assert isinstance(finished, Finished)
    stats = finished.stats
    assert (finished.request, stats.stage, stats.chunks) == (1, "here", 4)
    assert set(stats.sent_bytes) == {"client.0"}
    assert stats.first_input is not None
    assert stats.first_output is not None
    assert stats.started <= stats.first_input <= stats.first_output <= stats.finished


def test_a_turn_that_has_handled_all_there_was_is_the_last_one_before_sleep(harness: LoopHarness) -> None:
    into, out, engine = harness.input(), harness.output(), echo()
    harness.start(1)
    send(into, 1, 0, text="a", last=True)
    assert harness.loop.turn(engine) == (False, True)
    assert receive(out).data["text"] == "a"
    for _ in range(100):
        send(into, 1, 0, text="stale")
    assert harness.loop.turn(engine) == (True, True), "an edge delivers only so many chunks between two steps"
    assert harness.loop.turn(engine) == (False, True)
    harness.loop.close()


def test_large_chunks_share_a_turn_up_to_a_bound(harness: LoopHarness) -> None:
    nbytes = RECEIVE_BYTES // 4
    into, engine = harness.input(ring_bytes=4 * RECEIVE_BYTES), echo()
    out = harness.output(ring_bytes=4 * RECEIVE_BYTES)
    for number in range(1, 7):
        harness.start(number)
        send(into, number, 0, tensors={"body": np.zeros(nbytes, np.uint8)}, last=True)
    assert harness.loop.turn(engine) == (True, True)
    assert [receive(out).request for _ in range(4)] == [1, 2, 3, 4]
    assert out.try_recv() is None
    assert harness.loop.turn(engine) == (False, True)
    assert [receive(out).request for _ in range(2)] == [5, 6]
    harness.loop.close()


class MeasuredEcho(EchoEngine):
    def gauges(self) -> dict[str, float]:
        return {"requests": len(self._requests)}


def test_a_pong_carries_the_engine_s_measurements(harness: LoopHarness) -> None:
    harness.input()
    harness.run(MeasuredEcho(stage_context()))
    harness.post(Ping(1))
    harness.start(1)
    harness.post(Ping(2))
    assert [harness.next_message(), harness.next_message()] == [Pong(1, {"requests": 0}), Pong(2, {"requests": 1})]


def test_a_pong_of_an_engine_without_measurements_carries_its_number_only(harness: LoopHarness) -> None:
    harness.run(echo())
    harness.post(Ping(1))
    assert harness.next_message() == Pong(1)


def test_a_pong_does_not_wait_for_a_call_that_came_behind_its_ping(harness: LoopHarness) -> None:
    """A call may take longer than a ping may remain without an answer."""
    answered = threading.Event()

    class SlowCalls(EchoEngine):
        def capabilities(self) -> dict[str, str | None]:
            return {"slow": None}

        def call(self, capability: str, arguments: Mapping[str, Any]) -> bool:
            return answered.wait(WATCHDOG_S)

    harness.run(SlowCalls(stage_context()))
    harness.post(Ping(1), Call(1, "slow"))
    assert harness.next_message() == Pong(1)
    answered.set()
    assert harness.next_message() == CallAnswer(1, msgspec.Raw(msgspec.msgpack.encode(True)))


def test_a_chunk_before_its_start_waits_and_delays_the_chunks_after_it(harness: LoopHarness) -> None:
    into, out = harness.input(), harness.output()
    harness.run(echo())
    harness.start(1)
    send(into, 2, 0, text="early", last=True)
    send(into, 1, 0, text="behind", last=True)
    harness.wait_asleep()
    assert out.try_recv() is None
    harness.start(2)
    assert {receive(out).data["text"], receive(out).data["text"]} == {"early", "behind"}


def test_a_start_that_rings_no_bell_is_read_when_the_chunk_arrives_before_or_after_it(harness: LoopHarness) -> None:
    above, out = harness.input(source="above"), harness.output()
    harness.run(echo())
    harness.wait_asleep()
    harness.start(1, ("above",), wakes=False)
    send(above, 1, 0, source="above", text="after its start", last=True)
    assert receive(out).data["text"] == "after its start"
    send(above, 2, 0, source="above", text="before its start", last=True)
    harness.wait_asleep()
    assert out.try_recv() is None
    harness.start(2, ("above",), wakes=False)
    assert receive(out).data["text"] == "before its start"


def test_the_loop_sleeps_on_the_clients_edge_only_while_a_request_waits_for_its_input(harness: LoopHarness) -> None:
    into, out = harness.input(), harness.output()
    harness.run(echo())
    harness.wait_asleep()
    assert harness.rings_slept_on() == 0
    harness.start(1)
    harness.wait_asleep()
    assert harness.rings_slept_on() == 1
    send(into, 1, 0, text="all", last=True)
    assert receive(out).data["text"] == "all"
    harness.wait_asleep()
    assert harness.rings_slept_on() == 0


def test_an_early_chunk_delays_no_other_edge(harness: LoopHarness) -> None:
    early, other, out = harness.input(), harness.input(source="above"), harness.output()
    harness.run(echo())
    harness.start(1, ("above",))
    send(early, 2, 0, last=True)
    harness.wait_asleep()
    send(other, 1, 0, source="above", text="through", last=True)
    assert receive(out).data["text"] == "through"


def test_a_stale_chunk_is_dropped(harness: LoopHarness) -> None:
    """Chunks of a request that has ended, of an aborted one, and of one that only an earlier incarnation had."""
    harness.loop._newest = 5  # the fence
    into, out = harness.input(), harness.output()
    harness.run(echo())
    send(into, 5, 0, text="for the earlier incarnation", last=True)
    harness.start(6)
    send(into, 6, 0, text="six", last=True)
    assert receive(out).data["text"] == "six"
    send(into, 6, 1, text="after the end")
    harness.start(7)
    harness.post(Abort(7))
    harness.start(8)
    harness.wait_asleep()  # chunks travel separately: one that came before the abort would be answered
    send(into, 7, 0, text="aborted", last=True)
    send(into, 8, 0, text="eight", last=True)
    assert receive(out).data["text"] == "eight"


def test_an_abort_removes_a_waiting_request_from_the_engine(harness: LoopHarness) -> None:
    engine = echo()
    into, out = harness.input(), harness.output()
    harness.run(engine)
    harness.start(1)
    send(into, 1, 0, text="half")
    assert receive(out).data["text"] == "half"
    harness.post(Abort(1))
    harness.post(Abort(1))  # harmless
    harness.post(Abort(99))  # unknown here
    harness.wait_asleep()
    assert engine._requests == {}
    assert harness.messages.empty()


def test_a_paused_request_takes_input_and_gives_no_output_until_it_is_resumed(harness: LoopHarness) -> None:
    into, out = harness.input(), harness.output()
    harness.run(echo())
    harness.start(1)
    harness.start(2)
    harness.post(Pause(1), Pause(99), Resume(99))
    harness.wait_asleep()  # chunks travel separately: one that came before would be answered
    for seq, text in enumerate("ab"):
        send(into, 1, seq, text=text, last=text == "b")
    send(into, 2, 0, text="other", last=True)
    assert receive(out).data["text"] == "other"
    assert isinstance(harness.next_message(), Finished)
    harness.wait_asleep()
    assert out.try_recv() is None
    harness.post(Resume(1))
    assert [receive(out).data["text"] for _ in range(2)] == ["a", "b"]


def test_an_engine_that_cannot_pause_continues(harness: LoopHarness) -> None:
    class Plain(EchoEngine):
        pause = resume = None  # type: ignore[assignment]

    into, out = harness.input(), harness.output()
    harness.run(Plain(stage_context()))
    harness.start(1)
    harness.post(Pause(1))
    send(into, 1, 0, text="on", last=True)
    assert receive(out).data["text"] == "on"
    harness.post(Resume(1))


def test_a_new_ring_replaces_the_old_one_in_both_directions(harness: LoopHarness) -> None:
    old_in, old_out = harness.input(), harness.output()
    harness.run(echo())
    harness.start(1)
    send(old_in, 9, 0, text="held for a start that never comes")
    harness.wait_asleep()
    new_in, new_out = harness.input(), harness.output()
    harness.start(2)
    send(new_in, 2, 0, text="new", last=True)
    assert receive(new_out).data["text"] == "new"
    with pytest.raises(RingClosed):
        old_in.try_send(b"")
    with pytest.raises(RingClosed):
        old_out.try_recv()


def test_a_congested_output_stops_steps_and_receiving_until_there_is_room(
    harness: LoopHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness.loop, "_congested_bytes", 10_000)
    engine = echo(fan_out=100, payload_bytes=3000)
    into, out = harness.input(), harness.output(4096)
    harness.run(engine)
    harness.start(1)
    harness.start(2)
    send(into, 1, 0, last=True)
    harness.wait_asleep(receiving=False)
    stepped = engine._requests[1].seq
    assert stepped < 10
    send(into, 2, 0, last=True)
    harness.wait_asleep(receiving=False)
    assert engine._requests[1].seq == stepped
    assert engine._requests[2].head is None
    got = [receive(out) for _ in range(200)]
    for request in (1, 2):
        assert [chunk.seq for chunk in got if chunk.request == request] == list(range(100))


class RingCounter(EchoEngine):
    """Records before each output how many messages each of the harness's rings has carried."""

    def __init__(self, harness: LoopHarness) -> None:
        super().__init__(stage_context())
        self._rings = harness._rings
        self.carried: list[list[int]] = []

    def step(self) -> Iterator[StageOutput | StageFailure]:
        for output in super().step():
            self.carried.append([ring.statistics().messages for ring in self._rings])
            yield output


def test_the_outputs_of_a_step_are_sent_to_clients_before_stages(harness: LoopHarness) -> None:
    out, below, into = harness.output(), harness.output(target=BELOW), harness.input()
    engine = RingCounter(harness)
    for request in (1, 2, 3):
        harness.start(request, targets=(CLIENT_ADDRESS, BELOW))
        send(into, request, 0, last=True)
    harness.run(engine)
    assert [receive(out).request for _ in range(3)] == [receive(below).request for _ in range(3)] == [1, 2, 3]
    assert engine.carried == [[0, 0, 3], [1, 0, 3], [2, 0, 3]]


def test_outputs_that_no_client_gets_are_sent_to_stages_at_once(harness: LoopHarness) -> None:
    below, into = harness.output(target=BELOW), harness.input()
    engine = RingCounter(harness)
    for request in (1, 2, 3):
        harness.start(request, targets=(BELOW,))
        send(into, request, 0, last=True)
    harness.run(engine)
    assert [receive(below).request for _ in range(3)] == [1, 2, 3]
    assert engine.carried == [[0, 3], [1, 3], [2, 3]]


def test_a_consumer_that_closes_drops_its_backlog(harness: LoopHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that dies must not stop its upstream stage, neither by an error nor by its backlog."""
    monkeypatch.setattr(harness.loop, "_congested_bytes", 10_000)
    into, out = harness.input(), harness.output(4096)
    harness.run(echo(fan_out=10, payload_bytes=3000))
    harness.start(1)
    send(into, 1, 0, last=True)
    harness.wait_asleep(receiving=False)
    out.close()
    assert isinstance(harness.next_message(), Finished)
    harness.start(2)
    send(into, 2, 0, last=True)
    assert isinstance(harness.next_message(), Finished)
    again = harness.output()
    harness.start(3)
    send(into, 3, 0, last=True)
    assert [receive(again).request for _ in range(10)] == [3] * 10


def test_a_producer_that_closes_is_no_error(harness: LoopHarness) -> None:
    into, out = harness.input(), harness.output()
    harness.run(echo())
    harness.start(1)
    send(into, 1, 0, text="last output", last=True)
    into.close()
    assert receive(out).data["text"] == "last output"
    harness.wait_asleep()
    again = harness.input()
    harness.start(2)
    send(again, 2, 0, text="back", last=True)
    assert receive(out).data["text"] == "back"


def test_the_rings_of_a_replica_that_is_gone_are_freed(harness: LoopHarness) -> None:
    gone, left = harness.input(), harness.input(replica=1)
    unread, out, below = harness.output(target=GONE), harness.output(), harness.output(target=BELOW)
    harness.run(echo())
    harness.start(1, targets=(CLIENT_ADDRESS, GONE, BELOW))
    gone.close()
    unread.close()
    harness.wait_asleep()
    assert [edge.ring.closed for edge in harness.loop._incoming.values()] == [True, False]
    assert [edge.ring.closed for edge in harness.loop._outgoing.values()] == [True, False, False]
    send(left, 1, 0, text="to those that are left", last=True)
    assert receive(out).data["text"] == receive(below).data["text"] == "to those that are left"


def test_a_consumer_that_closes_before_the_loop_sleeps_wakes_it(harness: LoopHarness) -> None:
    """The loop sleeps for its output alone, and then has work again."""
    harness.input()
    out, engine = harness.output(), echo()
    harness.loop.turn(engine)
    harness.start(1)
    harness.loop.turn(engine)
    header = chunks.ChunkHeader(request=1, source="here", seq=0, last=False, data={})
    harness.loop._outgoing[CLIENT_ADDRESS].send(1, encode(header, {"large": np.zeros(9 << 20, np.uint8)}))
    assert harness.loop.turn(engine) == (False, False)
    out.close()
    with selectors.DefaultSelector() as bells:
        for bell in harness.loop.park(receiving=False):
            bells.register(bell, selectors.EVENT_READ)
        assert bells.select(0)
    harness.loop.close()


@pytest.mark.parametrize("seqs", [(1,), (0, 2)])
def test_a_gap_in_a_sequence_is_corruption(harness: LoopHarness, seqs: tuple[int, ...]) -> None:
    into, _ = harness.input(), harness.output()
    harness.run(echo())
    harness.start(1)
    for seq in seqs:
        send(into, 1, seq)
    assert isinstance(harness.wait_ended(), ChunkCorrupted)


def test_a_frame_that_is_no_chunk_is_corruption(harness: LoopHarness) -> None:
    into = harness.input()
    harness.run(echo())
    harness.start(1)
    into.send(*ringbuf.encode_bundle({"not": "a chunk"}, {}))
    assert isinstance(harness.wait_ended(), ChunkCorrupted)


@pytest.mark.parametrize("where", ["feed", "step"])
def test_a_refusal_is_reported_once_and_the_other_requests_continue(harness: LoopHarness, where: str) -> None:
    engine = echo()
    into, out = harness.input(), harness.output()
    harness.run(engine)
    harness.start(1)
    harness.start(2)
    send(into, 1, 0, echo={"invalid": where})
    assert harness.next_message() == Refused(1, "the chunk asked to be refused", "echo", "invalid_value")
    send(into, 1, 1, last=True)
    send(into, 2, 0, text="fine", last=True)
    assert receive(out).data["text"] == "fine"
    assert isinstance(harness.next_message(), Finished)
    assert harness.messages.empty()


class RefusingEcho(EchoEngine):
    def start(self, request: StageRequest) -> None:
        raise InvalidRequest("😀" * 1_000_000, param="😀" * 1_000_000)


class EarlyEcho(EchoEngine):
    def start(self, request: StageRequest) -> None:
        raise TemporarilyRefused("not yet", code="too_early")


def test_a_refusal_for_now_is_reported_as_one(harness: LoopHarness) -> None:
    harness.run(EarlyEcho(stage_context()))
    harness.start(1)
    assert harness.next_message() == Refused(1, "not yet", None, "too_early", retryable=True)


def test_a_long_refusal_is_cut_to_fit_into_a_control_message(harness: LoopHarness) -> None:
    harness.run(RefusingEcho(stage_context()))
    harness.start(1)
    refused = harness.next_message()
    assert isinstance(refused, Refused)
    assert encode_message(refused)


class UnspeakableEcho(EchoEngine):
    """Refuses a request for a file whose name is not UTF-8."""

    def start(self, request: StageRequest) -> None:
        raise InvalidRequest("no file \udcff", param="file \udcff")


def test_a_refusal_with_a_surrogate_can_be_sent(harness: LoopHarness) -> None:
    harness.run(UnspeakableEcho(stage_context()))
    harness.start(1)
    refused = harness.next_message()
    assert refused == Refused(1, "no file \\udcff", "file \\udcff", "invalid_value")
    assert encode_message(refused)


class RaisingWithView(EchoEngine):
    def feed(self, request_id: int, chunk: Chunk) -> None:
        view = chunk.tensors["audio"].numpy()
        raise ArithmeticError(f"{len(view)} samples are too many")


def test_views_kept_by_a_traceback_do_not_hide_the_engine_s_error(harness: LoopHarness) -> None:
    into = harness.input()
    harness.run(RaisingWithView(stage_context()))
    harness.start(1)
    send(into, 1, 0, tensors={"audio": np.zeros(7, np.float32)})
    assert isinstance(harness.wait_ended(), ArithmeticError)


def test_a_payload_larger_than_the_ring_passes_through(harness: LoopHarness) -> None:
    into, out = harness.input(8192), harness.output(8192)
    harness.run(echo())
    harness.start(1)
    pixels = np.random.default_rng(0).integers(0, 255, 1_000_000, np.uint8)
    send(into, 1, 0, last=True, tensors={"pixels": pixels})
    with out.recv(timeout=WATCHDOG_S) as frame:
        tensors = chunks.decode(frame.data)[1]
        assert np.array_equal(tensors["pixels"].numpy(), pixels)


def test_stop_closes_the_engine_and_both_kinds_of_rings(harness: LoopHarness) -> None:
    closed = threading.Event()

    class Closing(EchoEngine):
        def close(self) -> None:
            closed.set()

    into, out = harness.input(), harness.output()
    harness.run(Closing(stage_context()))
    harness.post(Stop())
    assert harness.wait_ended() is None
    assert closed.is_set()
    with pytest.raises(RingClosed):
        into.try_send(b"")
    with pytest.raises(RingClosed):
        out.try_recv()
