"""The pipelines of census.py, and systems that run them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import pytest

from omni_actors.config import Pipeline, Restart, Stage
from omni_actors.system import OmniSystem
from tests.orchestrator.census import CENSUS, MAX_REQUESTS
from tests.support.shared_system import SharedSystem, open_shared_system


@pytest.fixture(scope="module")
def census(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    path = tmp_path_factory.mktemp("census")
    (path / "census_engine.py").write_text(textwrap.dedent(CENSUS))
    engine, quick = "census_engine:Census", Restart(intensity=1000, backoff_s=0.01, backoff_max_s=0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        yield Pipeline(
            name="census",
            stages={
                "top": Stage(engine=engine, accepts=("script",), emits="text", restart=quick),
                "bottom": Stage(engine=engine, inputs=("top",), emits="audio", restart=quick),
            },
        )


@pytest.fixture
def alone(census: Pipeline) -> Pipeline:
    """A pipeline of the first stage alone."""
    return Pipeline(name="alone", stages={"top": census.stages["top"]})


@pytest.fixture(scope="module")
def shared_system(census: Pipeline, fixture_processes: set[int]) -> Iterator[SharedSystem]:
    with open_shared_system(
        lambda: OmniSystem.open(census, **{"limits.max_requests": MAX_REQUESTS}), fixture_processes
    ) as shared_system:
        yield shared_system


@pytest.fixture(scope="module")
def echo(fixture_processes: set[int]) -> Iterator[SharedSystem]:
    """The echo pipeline; the rings of the second stage are smaller than those of the first."""
    rings = {"stages.first.ring_bytes": 8192, "stages.second.ring_bytes": 4096}
    with open_shared_system(
        lambda: OmniSystem.open("echo", **rings, **{"stages.first.options.step_s": 0.001}), fixture_processes
    ) as shared_system:
        yield shared_system
