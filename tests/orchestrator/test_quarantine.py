"""Which requests are refused, and when two of them are alike."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from omni_actors.errors import Quarantined
from omni_actors.orchestrator.fingerprint import fingerprint
from omni_actors.orchestrator.pieces import Input
from omni_actors.orchestrator.quarantine import MAX_ENTRIES, Culprit, Quarantine
from omni_actors.orchestrator.routes import Route

ROUTE = Route(("s",), {}, {}, {})


def test_an_entry_ends_after_its_time() -> None:
    quarantine = Quarantine(10.0)
    assert not quarantine
    quarantine.add("a", Culprit("mouth"), 0.0)
    quarantine.check("b", 1.0)
    with pytest.raises(Quarantined, match=r"'mouth'.*next 7 s"):
        quarantine.check("a", 3.0)
    quarantine.check("a", 10.0)
    assert not quarantine


def test_only_the_latest_entries_are_kept() -> None:
    quarantine = Quarantine(10.0)
    for number in range(MAX_ENTRIES + 1):
        quarantine.add(str(number), Culprit("mouth"), 0.0)
    quarantine.check("0", 1.0)
    with pytest.raises(Quarantined):
        quarantine.check("1", 1.0)


def test_a_quarantine_of_no_time_keeps_nothing() -> None:
    quarantine = Quarantine(0.0)
    quarantine.add("a", Culprit("mouth"), 0.0)
    assert not quarantine


def test_requests_are_alike_in_input_and_parameters_whatever_their_seed() -> None:
    sound = np.zeros(3_000_000, np.float32)

    def of(text: str = "x", speed: float = 1.0, seed: int = 0, at: int = 0) -> str:
        changed = sound.copy()
        changed[at : at + 20_000] = 1
        inputs = {"script": [Input({"text": text})], "audio": [Input({}, {"audio": changed})]}
        params = msgspec.Raw(msgspec.msgpack.encode({"speed": speed, "seed": seed}))
        return fingerprint(ROUTE, inputs, {"s": params})

    assert of() == of(seed=7)
    assert len({of(), of("y"), of(speed=2.0), of(at=1_500_000), of(at=2_980_000)}) == 5
