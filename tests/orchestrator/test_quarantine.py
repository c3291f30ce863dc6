"""The quarantine of fingerprints, and what a fingerprint covers."""

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


def test_a_quarantine_ends_after_its_time() -> None:
    quarantine = Quarantine(10.0)
    assert not quarantine
    quarantine.add("a", Culprit("mouth"), 0.0)
    quarantine.check("b", 1.0)
    with pytest.raises(Quarantined, match=r"'mouth'.*next 7 s"):
        quarantine.check("a", 3.0)
    quarantine.check("a", 10.0)
    assert not quarantine


def test_each_fingerprint_is_refused_until_its_own_time() -> None:
    """Also if one was added again after the others."""
    quarantine = Quarantine(10.0)
    for now, fingerprint_ in enumerate("aba"):
        quarantine.add(fingerprint_, Culprit("mouth"), float(now))
    quarantine.check("b", 11.0)
    with pytest.raises(Quarantined, match="next 1 s"):
        quarantine.check("a", 11.0)


def test_only_the_latest_fingerprints_are_kept() -> None:
    quarantine = Quarantine(10.0)
    for number in range(MAX_ENTRIES + 1):
        quarantine.add(str(number), Culprit("mouth"), 0.0)
    quarantine.check("0", 1.0)
    with pytest.raises(Quarantined):
        quarantine.check("1", 1.0)


def test_a_hold_time_of_0_disables_the_quarantine() -> None:
    quarantine = Quarantine(0.0)
    quarantine.add("a", Culprit("mouth"), 0.0)
    assert not quarantine


def test_a_remembered_culprit_is_not_refused_and_a_convicted_one_stays_so() -> None:
    quarantine = Quarantine(10.0)
    quarantine.add("a", Culprit("mouth", deaths=1), 0.0)
    quarantine.check("a", 1.0)
    assert quarantine.pop("a") == Culprit("mouth", deaths=1)
    assert quarantine.pop("a") is None
    quarantine.add("a", Culprit("mouth"), 0.0)
    quarantine.add("a", Culprit("mouth", deaths=1), 1.0)
    with pytest.raises(Quarantined):
        quarantine.check("a", 2.0)


def test_an_input_that_cannot_be_encoded_has_no_fingerprint() -> None:
    params = msgspec.Raw(msgspec.msgpack.encode({}))
    assert fingerprint(ROUTE, {"script": [Input({"text": object()})]}, {"s": params}) is None


def test_a_fingerprint_covers_input_and_parameters_but_not_the_seed() -> None:
    sound = np.zeros(3_000_000, np.float32)

    def of(text: str = "x", speed: float = 1.0, seed: int = 0, at: int = 0) -> str | None:
        changed = sound.copy()
        changed[at : at + 20_000] = 1
        inputs = {"script": [Input({"text": text})], "audio": [Input({}, {"audio": changed})]}
        params = msgspec.Raw(msgspec.msgpack.encode({"speed": speed, "seed": seed}))
        return fingerprint(ROUTE, inputs, {"s": params})

    assert of() == of(seed=7)
    assert len({of(), of("y"), of(speed=2.0), of(at=1_500_000), of(at=2_980_000)}) == 5
