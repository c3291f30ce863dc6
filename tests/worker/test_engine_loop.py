"""The engine loop in a thread of this process, with real rings and the echo engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import ringbuf
from omni_actors.protocol import chunks
from omni_actors.protocol.chunks import ChunkCorrupted
from omni_actors.protocol.messages import (
    CLIENT_ADDRESS,
    Abort,
    Address,
    Finished,
    Pause,
    Ping,
    Pong,
    Refused,
    Resume,
    Stop,
)
from omni_actors.stages.base import Chunk, InvalidRequest, StageContext, StageFailure, StageOutput, StageRequest
from omni_actors.stages.echo import EchoEngine
from omni_actors.worker import engine_loop as loop
from ringbuf import RingClosed
from tests.worker.bench import WATCHDOG_S, Bench, echo, open_bench, receive, send

BELOW = Address("below", 0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with open_bench() as bench:
        yield bench


def test_chunks_go_through_in_order_and_the_end_is_told_after_the_last(bench: Bench) -> None:
    into, out = bench.input(), bench.output()
    bench.run(echo(fan_out=2))
    bench.start(1)
    send(into, 1, 0, text="a")
    send(into, 1, 1, text="b", last=True)
    got = [receive(out) for _ in range(4)]
    assert [(chunk.seq, chunk.data["text"], chunk.last) for chunk in got] == [
        (0, "a", False),
        (1, "a", False),
        (2, "b", False),
        (3, "b", True),
    ]
    finished = bench.heard()
    assert isinstance(finished, Finished)
    stats = finished.stats
    assert (finished.request, stats.stage, stats.chunks) == (1, "here", 4)
    assert set(stats.sent_bytes) == {"client.0"}
    assert stats.first_input is not None
    assert stats.first_output is not None
    assert stats.started <= stats.first_input <= stats.first_output <= stats.finished


class Weighed(EchoEngine):
    def gauges(self) -> dict[str, float]:
        return {"requests": len(self._requests)}


def test_a_ping_is_answered_with_what_the_engine_measures_of_itself(bench: Bench) -> None:
    bench.input()
    bench.run(Weighed(StageContext("here", None, {}, 1, "cpu", lambda note: None)))
    bench.loop.post(Ping(1))
    bench.start(1)
    bench.loop.post(Ping(2))
    assert [bench.heard(), bench.heard()] == [Pong(1, {"requests": 0}), Pong(2, {"requests": 1})]


def test_an_engine_that_measures_nothing_answers_with_the_number_alone(bench: Bench) -> None:
    bench.run(echo())
    bench.loop.post(Ping(1))
    assert bench.heard() == Pong(1)


def test_a_chunk_before_its_start_waits_and_holds_what_is_behind_it(bench: Bench) -> None:
    into, out = bench.input(), bench.output()
    bench.run(echo())
    bench.start(1)
    send(into, 2, 0, text="early", last=True)
    send(into, 1, 0, text="behind", last=True)
    bench.wait_asleep()
    assert out.try_recv() is None
    bench.start(2)
    assert {receive(out).data["text"], receive(out).data["text"]} == {"early", "behind"}


def test_an_early_chunk_holds_up_no_other_edge(bench: Bench) -> None:
    early, other, out = bench.input(), bench.input(source="above"), bench.output()
    bench.run(echo())
    bench.start(1, ("above",))
    send(early, 2, 0, last=True)
    bench.wait_asleep()
    send(other, 1, 0, source="above", text="through", last=True)
    assert receive(out).data["text"] == "through"


def test_a_stale_chunk_is_dropped(bench: Bench) -> None:
    """Of a request that ended here, that was aborted here, and that this incarnation never knew."""
    bench.loop._newest = 5  # the fence
    into, out = bench.input(), bench.output()
    bench.run(echo())
    send(into, 5, 0, text="of the dead", last=True)
    bench.start(6)
    send(into, 6, 0, text="six", last=True)
    assert receive(out).data["text"] == "six"
    send(into, 6, 1, text="after the end")
    bench.start(7)
    bench.loop.post(Abort(7))
    bench.start(8)
    send(into, 7, 0, text="aborted", last=True)
    send(into, 8, 0, text="eight", last=True)
    assert receive(out).data["text"] == "eight"


def test_a_request_aborted_while_it_waits_is_gone_from_the_engine(bench: Bench) -> None:
    engine = echo()
    into, out = bench.input(), bench.output()
    bench.run(engine)
    bench.start(1)
    send(into, 1, 0, text="half")
    assert receive(out).data["text"] == "half"
    bench.loop.post(Abort(1))
    bench.loop.post(Abort(1))  # harmless
    bench.loop.post(Abort(99))  # never seen
    bench.wait_asleep()
    assert engine._requests == {}
    assert bench.said.empty()


def test_a_paused_request_gives_nothing_until_it_is_resumed_and_takes_its_input(bench: Bench) -> None:
    into, out = bench.input(), bench.output()
    bench.run(echo())
    bench.start(1)
    bench.start(2)
    bench.loop.post(Pause(1), Pause(99), Resume(99))
    for seq, text in enumerate("ab"):
        send(into, 1, seq, text=text, last=text == "b")
    send(into, 2, 0, text="other", last=True)
    assert receive(out).data["text"] == "other"
    assert isinstance(bench.heard(), Finished)
    bench.wait_asleep()
    assert out.try_recv() is None
    bench.loop.post(Resume(1))
    assert [receive(out).data["text"] for _ in range(2)] == ["a", "b"]


def test_an_engine_that_cannot_pause_goes_on(bench: Bench) -> None:
    class Plain(EchoEngine):
        pause = resume = None  # type: ignore[assignment]

    into, out = bench.input(), bench.output()
    bench.run(Plain(StageContext("here", None, {}, 1, "cpu", lambda note: None)))
    bench.start(1)
    bench.loop.post(Pause(1))
    send(into, 1, 0, text="on", last=True)
    assert receive(out).data["text"] == "on"
    bench.loop.post(Resume(1))


def test_a_new_ring_replaces_the_old_one_in_both_directions(bench: Bench) -> None:
    old_in, old_out = bench.input(), bench.output()
    bench.run(echo())
    bench.start(1)
    send(old_in, 9, 0, text="held for a start that never comes")
    bench.wait_asleep()
    new_in, new_out = bench.input(), bench.output()
    bench.start(2)
    send(new_in, 2, 0, text="new", last=True)
    assert receive(new_out).data["text"] == "new"
    with pytest.raises(RingClosed):
        old_in.try_send(b"")
    with pytest.raises(RingClosed):
        old_out.try_recv()


def test_a_stuck_output_stops_stepping_and_receiving_until_there_is_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "CONGESTED_BYTES", 10_000)
    engine = echo(fan_out=100, payload_bytes=3000)
    into, out = bench.input(), bench.output(4096)
    bench.run(engine)
    bench.start(1)
    bench.start(2)
    send(into, 1, 0, last=True)
    bench.wait_asleep(receiving=False)
    stepped = engine._requests[1].seq
    assert stepped < 10
    send(into, 2, 0, last=True)
    bench.wait_asleep(receiving=False)
    assert engine._requests[1].seq == stepped
    assert engine._requests[2].head is None
    got = [receive(out) for _ in range(200)]
    for request in (1, 2):
        assert [chunk.seq for chunk in got if chunk.request == request] == list(range(100))


class Counting(EchoEngine):
    """Looks, before each output, how many messages each of the bench's rings has carried."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(StageContext("here", None, {}, 1, "cpu", lambda note: None))
        self._rings = bench._rings
        self.carried: list[list[int]] = []

    def step(self) -> Iterator[StageOutput | StageFailure]:
        for output in super().step():
            self.carried.append([ring.statistics().messages for ring in self._rings])
            yield output


def test_clients_get_a_step_s_outputs_before_the_stages_that_get_them_too(bench: Bench) -> None:
    out, below, into = bench.output(), bench.output(target=BELOW), bench.input()
    engine = Counting(bench)
    for request in (1, 2, 3):
        bench.start(request, targets=(CLIENT_ADDRESS, BELOW))
        send(into, request, 0, last=True)
    bench.run(engine)
    assert [receive(out).request for _ in range(3)] == [receive(below).request for _ in range(3)] == [1, 2, 3]
    assert engine.carried == [[0, 0, 3], [1, 0, 3], [2, 0, 3]]


def test_stages_get_at_once_what_no_client_gets(bench: Bench) -> None:
    below, into = bench.output(target=BELOW), bench.input()
    engine = Counting(bench)
    for request in (1, 2, 3):
        bench.start(request, targets=(BELOW,))
        send(into, request, 0, last=True)
    bench.run(engine)
    assert [receive(below).request for _ in range(3)] == [1, 2, 3]
    assert engine.carried == [[0, 3], [1, 3], [2, 3]]


def test_a_consumer_that_leaves_takes_its_backlog_with_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that dies must not stop the one above, which serves others: neither by an error nor by its backlog."""
    monkeypatch.setattr(loop, "CONGESTED_BYTES", 10_000)
    into, out = bench.input(), bench.output(4096)
    bench.run(echo(fan_out=10, payload_bytes=3000))
    bench.start(1)
    send(into, 1, 0, last=True)
    bench.wait_asleep(receiving=False)
    out.close()
    assert isinstance(bench.heard(), Finished)
    bench.start(2)
    send(into, 2, 0, last=True)
    assert isinstance(bench.heard(), Finished)
    again = bench.output()
    bench.start(3)
    send(into, 3, 0, last=True)
    assert [receive(again).request for _ in range(10)] == [3] * 10


def test_a_producer_that_leaves_is_not_an_error(bench: Bench) -> None:
    into, out = bench.input(), bench.output()
    bench.run(echo())
    bench.start(1)
    send(into, 1, 0, text="last words", last=True)
    into.close()
    assert receive(out).data["text"] == "last words"
    bench.wait_asleep()
    again = bench.input()
    bench.start(2)
    send(again, 2, 0, text="back", last=True)
    assert receive(out).data["text"] == "back"


@pytest.mark.parametrize("seqs", [(1,), (0, 2)])
def test_a_gap_in_a_sequence_is_corruption(bench: Bench, seqs: tuple[int, ...]) -> None:
    into, _ = bench.input(), bench.output()
    bench.run(echo())
    bench.start(1)
    for seq in seqs:
        send(into, 1, seq)
    assert isinstance(bench.wait_ended(), ChunkCorrupted)


def test_a_frame_that_is_no_chunk_is_corruption(bench: Bench) -> None:
    into = bench.input()
    bench.run(echo())
    into.send(*ringbuf.encode_bundle({"not": "a chunk"}, {}))
    assert isinstance(bench.wait_ended(), ChunkCorrupted)


@pytest.mark.parametrize("where", ["feed", "step"])
def test_a_refused_request_is_told_once_and_the_others_go_on(bench: Bench, where: str) -> None:
    engine = echo()
    into, out = bench.input(), bench.output()
    bench.run(engine)
    bench.start(1)
    bench.start(2)
    send(into, 1, 0, echo={"invalid": where})
    assert bench.heard() == Refused(1, "the chunk asked to be refused", "echo", "invalid_value")
    send(into, 1, 1, last=True)
    send(into, 2, 0, text="fine", last=True)
    assert receive(out).data["text"] == "fine"
    assert isinstance(bench.heard(), Finished)
    assert bench.said.empty()


class Refusing(EchoEngine):
    def start(self, request: StageRequest) -> None:
        raise InvalidRequest("x" * 1_000_000)


def test_a_refusal_fits_into_a_control_message_however_long_it_is(bench: Bench) -> None:
    bench.run(Refusing(StageContext("here", None, {}, 1, "cpu", lambda note: None)))
    bench.start(1)
    refused = bench.heard()
    assert isinstance(refused, Refused)
    assert len(refused.message) < 100_000


class Viewing(EchoEngine):
    def feed(self, request_id: int, chunk: Chunk) -> None:
        view = chunk.tensors["audio"].numpy()
        raise ArithmeticError(f"{len(view)} samples are too many")


def test_an_engine_s_error_is_not_hidden_by_the_views_that_its_traceback_keeps(bench: Bench) -> None:
    into = bench.input()
    bench.run(Viewing(StageContext("here", None, {}, 1, "cpu", lambda note: None)))
    bench.start(1)
    send(into, 1, 0, tensors={"audio": np.zeros(7, np.float32)})
    assert isinstance(bench.wait_ended(), ArithmeticError)


def test_a_payload_larger_than_the_ring_passes_through(bench: Bench) -> None:
    into, out = bench.input(8192), bench.output(8192)
    bench.run(echo())
    bench.start(1)
    pixels = np.random.default_rng(0).integers(0, 255, 1_000_000, np.uint8)
    send(into, 1, 0, last=True, tensors={"pixels": pixels})
    with out.recv(timeout=WATCHDOG_S) as frame:
        tensors = chunks.decode(frame.data)[1]
        assert np.array_equal(tensors["pixels"].numpy(), pixels)


def test_stop_closes_the_engine_and_both_kinds_of_rings(bench: Bench) -> None:
    closed = threading.Event()

    class Closing(EchoEngine):
        def close(self) -> None:
            closed.set()

    into, out = bench.input(), bench.output()
    bench.run(Closing(StageContext("here", None, {}, 1, "cpu", lambda note: None)))
    bench.loop.post(Stop(1.0))
    assert bench.wait_ended() is None
    assert closed.is_set()
    with pytest.raises(RingClosed):
        into.try_send(b"")
    with pytest.raises(RingClosed):
        out.try_recv()
