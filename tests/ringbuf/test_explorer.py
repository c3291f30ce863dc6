"""The protocol under all interleavings; and bugs, planted in its source, that must not get by."""

from __future__ import annotations

import gc
import inspect
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from ringbuf import Consumer, Producer
from ringbuf._words import ConsumerEnd, ProducerEnd
from tests.ringbuf.explorer import explore
from tests.ringbuf.machine import Violation
from tests.ringbuf.scenarios import SCENARIOS
from tests.ringbuf.side import Parts


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """States are many, and none is garbage: to look for it takes a third of the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def small_rings_rewind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the scenario of that name."""
    if "rewind" in request.node.callspec.id:
        monkeypatch.setattr("ringbuf._words.WARM", 64)


def edited(owner: type, method: str, *edits: tuple[str, str]) -> Any:
    """The class with one method changed: each text, found once in its source, is another."""
    source = textwrap.dedent(inspect.getsource(getattr(owner, method)))
    for text, other in edits:
        assert source.count(text) == 1, f"{method} has changed: plant this bug anew"
        source = source.replace(text, other)
    namespace: dict[str, Any] = {}
    exec(source, vars(sys.modules[owner.__module__]), namespace)
    return type(owner.__name__, (owner,), {"__slots__": (), method: namespace[method]})


def producing(method: str, *edits: tuple[str, str]) -> Parts:
    return Parts(producer_end=edited(ProducerEnd, method, *edits))


def consuming(method: str, *edits: tuple[str, str]) -> Parts:
    return Parts(consumer_end=edited(ConsumerEnd, method, *edits))


def before(statement: str, other: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """``statement``, which comes later in the method, moved before ``other``."""
    return (statement, ""), (other, statement + other)


class Bug(NamedTuple):
    parts: Parts
    scenario: str
    found: str


ASLEEP = "for ever"
NO_FENCE = "self._release()", "pass"
NO_SECOND_LOOK = "words[self._peer_position] >= wanted or words[self._peer_closed]", "False"
LOOK_FIRST = before("    wanted = words[self._peer_waits]\n", "    words[self._position] = position")
TAIL_FIRST = before(
    "    self._end.publish_record(start, kind, length, place)\n", "    at = start % self._capacity + RECORD\n"
)
RECORD_LAST = (
    "    words = self._words\n",
    "    words = self._words\n    words[self._position] = start + RECORD + (length + RECORD - 1) // RECORD * RECORD\n",
)

BUGS = {
    "the producer publishes without a fence": Bug(producing("publish", NO_FENCE), "blocking", ASLEEP),
    "the consumer publishes without a fence": Bug(consuming("publish", NO_FENCE), "blocking", ASLEEP),
    "the producer parks without a fence": Bug(producing("park", NO_FENCE), "blocking", ASLEEP),
    "the consumer parks without a fence": Bug(consuming("park", NO_FENCE), "blocking", ASLEEP),
    "the producer closes without a fence": Bug(producing("wake", NO_FENCE), "both close", ASLEEP),
    "the consumer closes without a fence": Bug(consuming("wake", NO_FENCE), "consumer closes", ASLEEP),
    "the producer looks for a sleeper, then publishes": Bug(producing("publish", *LOOK_FIRST), "blocking", ASLEEP),
    "the consumer looks for a sleeper, then publishes": Bug(consuming("publish", *LOOK_FIRST), "wrap", ASLEEP),
    "the producer parks without a second look": Bug(producing("park", NO_SECOND_LOOK), "blocking", ASLEEP),
    "the consumer parks without a second look": Bug(consuming("park", NO_SECOND_LOOK), "blocking", ASLEEP),
    "the consumer parks though the producer closed": Bug(
        consuming("park", (" or words[self._peer_closed]", "")), "both close", ASLEEP
    ),
    "the consumer empties its bell once it is parked": Bug(
        consuming("park", ("self.parked = True", "self.parked = True; self._bell.clear()")), "blocking", ASLEEP
    ),
    "the consumer does not look again at the tail of a producer that closed": Bug(
        Parts(consumer=edited(Consumer, "_load_tail", ("        tail = end.peer_position()\n", ""))),
        "both close",
        "at the end",
    ),
    "the consumer does not look again at the tail of a producer that died": Bug(
        Parts(consumer=edited(Consumer, "recv", ("if self.park():", "if True:"))), "producer dies", "at the end"
    ),
    "words are stored as struct.pack_into does": Bug(Parts(clears_words_first=True), "blocking", "and tail 0 of"),
    "the tail is stored before the payload": Bug(
        Parts(producer=edited(Producer, "_try_record", *TAIL_FIRST)), "blocking", "torn"
    ),
    "the tail is stored before the record": Bug(producing("publish_record", RECORD_LAST), "blocking", "torn"),
    "the space of a frame is given back before its release": Bug(
        Parts(consumer=edited(Consumer, "_reclaim", ("if self._unreleased:", "if False:"))), "held past the end", "uses"
    ),
    "the space of a fragment is given back before it is copied": Bug(
        Parts(
            consumer=edited(
                Consumer,
                "try_recv",
                *before("        self._reclaim(after)\n", "        whole = self._gather(start, kind, length, place)\n"),
            )
        ),
        "fragments",
        "torn",
    ),
    "the ring is taken to be a record larger": Bug(
        producing("allocate", ("start + need - capacity", "start + need - capacity - RECORD")), "exactly full", "tail"
    ),
    "a record may stick out by a header": Bug(
        producing("allocate", ("offset + need > capacity", "offset + need > capacity + RECORD")), "wrap", "fails"
    ),
    "padding is a header too long": Bug(
        producing("allocate", ("capacity - offset - RECORD", "capacity - offset")), "wrap", "RingCorrupted"
    ),
    "an empty ring begins again where the record does not fit": Bug(
        producing("allocate", ("need <= offset >= WARM", "need <= offset + RECORD >= WARM")), "rewind", ASLEEP
    ),
    "a consumer that finds nothing never looks again": Bug(
        Parts(
            consumer=edited(
                Consumer,
                "_load_tail",
                ("    tail = end.peer_position()\n    if", "    tail = end.peer_position() and following\n    if"),
            )
        ),
        "spinning",
        "this can go on for ever",
    ),
    "parking always finds something": Bug(
        Parts(consumer=edited(Consumer, "park", ("return self._end.park(self._next + 1)", "return False"))),
        "blocking",
        "runs in circles",
    ),
}


EXPENSIVE = ("unsent", "wrap", "producer succeeded in fragments")


@pytest.mark.parametrize(
    "scenario", [pytest.param(name, marks=pytest.mark.slow if name in EXPENSIVE else ()) for name in SCENARIOS]
)
def test_no_interleaving_breaks_the_protocol(scenario: str) -> None:
    assert explore(SCENARIOS[scenario]).ends


@pytest.mark.parametrize(("bug", "scenario"), [(bug, BUGS[bug].scenario) for bug in BUGS])
def test_a_planted_bug_is_found(bug: str, scenario: str) -> None:
    with pytest.raises(Violation, match=BUGS[bug].found):
        explore(SCENARIOS[scenario], BUGS[bug].parts)
