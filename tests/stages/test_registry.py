"""The table of the engines, and what an installation brings for them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from omni_actors.stages.registry import ENGINES

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
DISTRIBUTIONS = {"faster_whisper": "faster-whisper", "hibari": "hibari-tts"}
"""The distributions whose names are not those of their imports."""


def test_the_extra_of_an_engine_installs_its_libraries() -> None:
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    for name, spec in ENGINES.items():
        installed = {re.split(r"[^\w-]", requirement)[0] for requirement in extras[spec.extra]}
        assert {DISTRIBUTIONS.get(library, library) for library in spec.libraries} <= installed, name
