"""The set of requests that wait for their client is what each of them says; and what an engine is told of one."""

from __future__ import annotations

import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors.protocol.chunks import ChunkCorrupted, ChunkHeader
from omni_actors.protocol.messages import CLIENT, CLIENT_ADDRESS, Address, Start
from omni_actors.worker.active import ActiveRequest, ActiveRequests, stage_request

UPSTREAM = Address("upstream", 0)


def start(number: int, sources: tuple[str, ...]) -> Start:
    return Start(
        request=number,
        sources=sources,
        targets=(CLIENT_ADDRESS,),
        params=msgspec.Raw(msgspec.msgpack.encode({})),
    )


def chunk(number: int, source: str, seq: int, *, last: bool) -> ChunkHeader:
    return ChunkHeader(request=number, source=source, seq=seq, last=last, data={})


@given(st.data())
def test_the_sets_follow_the_requests(data: st.DataObject) -> None:
    requests, received = ActiveRequests(), dict[tuple[int, str], int]()
    for number in range(1, 5):
        sources = tuple(data.draw(st.sets(st.sampled_from([CLIENT, "upstream"]))))
        requests[number] = ActiveRequest(start(number, sources), 0.0)
        requests.note(requests[number])
        received |= {(number, source): 0 for source in sources}
    for _ in range(data.draw(st.integers(0, 12))):
        number = data.draw(st.integers(1, 4))
        active = requests.get(number)
        if active is None:
            continue
        if not data.draw(st.booleans()):
            requests.remove(number)
            continue
        source = data.draw(st.sampled_from([CLIENT, "upstream"]))
        if active.awaits(source):
            seq, last = received[number, source], data.draw(st.booleans())
            active.accept(chunk(number, source, seq, last=last), {}, UPSTREAM)
            received[number, source] = seq + 1
        requests.note(active)
    assert requests.awaiting_client == {number for number, each in requests.items() if each.awaits(CLIENT)}


def test_an_engine_learns_whether_its_request_is_replayed() -> None:
    first = start(1, (CLIENT,))
    again = msgspec.structs.replace(first, replayed=True)
    assert [stage_request(each, None, None).replayed for each in (first, again)] == [False, True]


def test_a_replayed_request_takes_no_chunk_before_the_first_one() -> None:
    """What was sent to its start of before, which was aborted in this worker, may still be in the ring."""
    active = ActiveRequest(msgspec.structs.replace(start(1, (CLIENT,)), replayed=True), 0.0)
    accepted = [active.accept(chunk(1, CLIENT, seq, last=False), {}, UPSTREAM) for seq in (2, 3, 0, 1, 2)]
    assert accepted == [False, False, True, True, True]


def test_a_request_that_is_not_replayed_misses_a_chunk() -> None:
    active = ActiveRequest(start(1, (CLIENT,)), 0.0)
    with pytest.raises(ChunkCorrupted, match="received chunk 1, expected chunk 0"):
        active.accept(chunk(1, CLIENT, 1, last=False), {}, UPSTREAM)


def test_a_target_replaces_the_earlier_replica_of_its_stage_and_needs_all_outputs() -> None:
    first, other, second = Address("a", 0), Address("b", 0), Address("a", 1)
    resumed = msgspec.structs.replace(start(1, (CLIENT,)), targets=(first, other), needed_from=(4, 7))
    active = ActiveRequest(resumed, 0.0)
    assert active.first_needed == 4
    active.remove_targets("a")
    assert (active.targets, active.first_needed) == ((other,), 7)
    active.add_target(first)
    assert (active.targets, active.first_needed) == ((other, first), 0)
    active.add_target(second)
    assert active.targets == (other, second)
    assert list(active.stats("s", 0.0, 0.0).sent_bytes) == [str(each) for each in (first, other, second)]


def test_the_first_input_is_timed_once() -> None:
    active = ActiveRequest(start(1, (CLIENT,)), 0.0)
    assert active.first_input is None
    active.accept(chunk(1, CLIENT, 0, last=False), {}, UPSTREAM)
    first = active.first_input
    assert first is not None
    assert active.started <= first <= time.monotonic()
    active.accept(chunk(1, CLIENT, 1, last=False), {}, UPSTREAM)
    assert active.first_input == first
