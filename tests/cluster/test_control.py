"""Frames of the control connection: what is changed, left out, inserted or sent again ends it."""

from __future__ import annotations

import secrets

import pytest

from omni_actors.cluster import control
from omni_actors.cluster.control import ControlCorrupted, Opener, Sealer
from omni_actors.errors import WorkerExit
from omni_actors.protocol.messages import Address

KEY = secrets.token_bytes(32)
SENT: list[control.FromAgent] = [
    control.Hello("1.2", 7, ("127.0.0.1", 9)),
    control.Hello(version="1.2", pid=7, links=("127.0.0.1", 9), fault="no NIXL"),
    control.FromWorker(1, b"packet"),
    control.Ending(1, WorkerExit(8, "SIGKILL", None, ("last line",))),
    control.Statistics({3: (4096, 1, 2, 3)}),
]


def frames() -> list[bytes]:
    sealer = Sealer(KEY)
    return [sealer.seal([control.encode(message)]) for message in SENT]


def opened(data: bytes, key: bytes = KEY) -> list[control.FromAgent]:
    return list(Opener(key, control.FROM_AGENT).feed(data))


def test_messages_arrive_as_they_were_sent_however_the_bytes_are_cut() -> None:
    data, opener = b"".join(frames()), Opener(KEY, control.FROM_AGENT)
    assert [message for n in range(len(data)) for message in opener.feed(data[n : n + 1])] == SENT


def test_many_messages_travel_in_one_frame() -> None:
    orders: list[control.ToAgent] = [
        control.Spawn(worker=1, address=Address("llm", 0), mailbox_capacity=8, environment={"A": "b"}),
        control.MakeRing(1, 4096, ("10.0.0.1", 5)),
        control.MakeRing(2, 4096, "in"),
        control.MakeRing(3, 4096, None),
        control.CloseRing(2, "consumer"),
    ]
    frame = Sealer(KEY).seal([control.encode(order) for order in orders])
    assert list(Opener(KEY, control.TO_AGENT).feed(frame)) == orders


@pytest.mark.parametrize("place", range(0, 60, 3))
def test_a_changed_byte_is_found(place: int) -> None:
    data = bytearray(b"".join(frames()))
    data[place] ^= 1
    with pytest.raises(ControlCorrupted):
        opened(bytes(data) + bytes(control.MOST_BYTES))  # a larger size is complete, too


@pytest.mark.parametrize("order", [[1], [0, 0], [0, 2], [1, 0]], ids=["late", "repeated", "left out", "swapped"])
def test_a_frame_that_is_not_the_next_one_is_refused(order: list[int]) -> None:
    sent = frames()
    with pytest.raises(ControlCorrupted, match="tag of frame"):
        opened(b"".join(sent[n] for n in order))


def test_another_key_opens_nothing() -> None:
    with pytest.raises(ControlCorrupted, match="tag of frame 0"):
        opened(frames()[0], secrets.token_bytes(32))


def test_a_size_above_the_bound_is_refused_before_its_bytes_arrive() -> None:
    with pytest.raises(ControlCorrupted, match="at most"):
        opened((control.MOST_BYTES + 1).to_bytes(4, "little"))


def test_messages_of_the_other_direction_are_refused() -> None:
    frame = Sealer(KEY).seal([control.encode(control.Kill(1))])
    with pytest.raises(ControlCorrupted, match="not a list of messages"):
        opened(frame)


def test_a_message_that_fits_no_frame_is_refused_where_it_is_made() -> None:
    with pytest.raises(ValueError, match="at most"):
        control.encode(control.FromWorker(1, bytes(control.MOST_BYTES)))
