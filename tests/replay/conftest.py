"""The directory of the marker files, and a system that runs the pipeline of mortal.py."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_actors.system import OmniSystem
from tests.replay.mortal import ENGINES, pipeline
from tests.support.shared_system import SharedSystem, open_shared_system


@pytest.fixture(scope="module", autouse=True)
def markers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of the marker files. The engine can be imported here and in workers."""
    path = tmp_path_factory.mktemp("mortal")
    (path / "mortal_engines.py").write_text(textwrap.dedent(ENGINES))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        patch.setenv("MARKERS", str(path))
        yield path


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int], markers: Path) -> Iterator[SharedSystem]:
    with open_shared_system(lambda: OmniSystem.open(pipeline()), fixture_processes) as shared_system:
        yield shared_system
