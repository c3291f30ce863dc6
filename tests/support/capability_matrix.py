"""Tries every capability on the engines of a pipeline, and compares what was found with what is stored.

`pytest --write-api …` stores it instead, for the engines that this environment has.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from omni_actors import OmniSystem
from omni_actors.errors import Unsupported
from tests.support.capability_probes import CAPABILITIES
from tests.support.capability_subjects import FAMILIES, Subject
from tests.support.shared_system import SharedSystem

MATRIX = Path(__file__).parents[1] / "api/matrix.json"
"""By engine and capability: null if it works, else why not. A capability that does not concern an engine is missing."""
WATCHDOG_S = 300.0


async def _found(subject: Subject) -> dict[str, str | None]:
    outcomes: dict[str, str | None] = {}
    for capabilities in CAPABILITIES.values():
        for name, capability in capabilities.items():
            if not capability.concerns(subject):
                continue
            with trio.fail_after(WATCHDOG_S):
                try:
                    await capability.probe(subject)
                    outcomes[name] = None
                except Unsupported as error:
                    outcomes[name] = error.why
    return outcomes


def check_capabilities(family: str, shared_system: SharedSystem, config: pytest.Config) -> None:
    """Try every capability on every engine of a family, and compare or store the outcomes."""
    outcomes: dict[str, dict[str, str | None]] = {}

    async def work(omni: OmniSystem) -> None:
        for subject in FAMILIES[family].subjects(omni):
            outcomes[subject.engine] = await _found(subject)

    shared_system.run(work)
    documented = json.loads(MATRIX.read_text())
    if config.getoption("--write-api"):
        MATRIX.write_text(json.dumps({**documented, **outcomes}, indent=1, ensure_ascii=False) + "\n")
    else:
        assert outcomes == {engine: documented[engine] for engine in outcomes}
