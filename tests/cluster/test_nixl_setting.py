"""``cluster.transport`` and what needs no NIXL: a clear error without the package, and the division of memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors import OmniSystem
from omni_actors.cluster import spawner
from omni_actors.cluster.spawner import open_cluster
from omni_actors.cluster.subprocess_agents import SubprocessAgents
from omni_actors.cluster.transfers import PACKAGE, Extents, NixlUnavailable, Transfers
from omni_actors.errors import ClusterUnavailable, ConfigError
from tests.cluster.nixl_rings import why_no_nixl
from tests.cluster.subprocess_cluster import FixedPlaces, named
from tests.support.open_descriptors import open_descriptors

FILE = """\
name: heard
stages:
  ear: {engine: echo, accepts: [audio], emits: audio}
cluster: {transport: nixl}
"""
LEASE_S = 4.0
EXTRA = r"pip install '\.\[nixl\]' in the clone"


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, None)


async def test_nixl_without_the_package_is_refused_before_anything_starts(no_package: None, tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(FILE)
    with pytest.raises(ConfigError, match=EXTRA) as caught:
        async with OmniSystem.open(file, cluster="auto"):
            raise AssertionError("it was opened")
    assert (caught.value.path, caught.value.found) == ("cluster.transport", "nixl")


async def test_nixl_has_no_effect_without_a_cluster(no_package: None, tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(FILE)
    async with OmniSystem.open(file) as omni:
        assert omni.health().ready


async def test_nixl_and_tls_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(FILE.replace("nixl}", "nixl, tls: true}"))
    with pytest.raises(ConfigError, match=r"accepted: tcp, with cluster.tls: NIXL does not encrypt"):
        async with OmniSystem.open(file):
            raise AssertionError("it was opened")


async def test_a_parent_without_the_package_cannot_open_a_cluster(no_package: None) -> None:
    with pytest.raises(ClusterUnavailable, match=rf"'parent' cannot be used: NIXL .*\({EXTRA}\)"):
        async with open_cluster(named("a"), SubprocessAgents(), FixedPlaces({}), transport="nixl"):
            raise AssertionError("it was opened")


@pytest.mark.skipif(why_no_nixl() is not None, reason=str(why_no_nixl()))
async def test_an_agent_without_nixl_says_why(tmp_path: Path) -> None:
    (tmp_path / f"{PACKAGE}.py").write_text("raise ImportError('libcudart.so is missing')")
    agents = SubprocessAgents({"a": ["env", f"PYTHONPATH={tmp_path}:{Path(__file__).parents[2]}"]})
    with pytest.raises(ClusterUnavailable, match=r"'a' cannot be used: NIXL .*: ImportError: libcudart\.so is"):
        async with open_cluster(named("a"), agents, FixedPlaces({}), transport="nixl"):
            raise AssertionError("it was opened")


async def test_an_agent_whose_nixl_starts_late_keeps_its_lease_and_says_what_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package takes longer than a lease until it fails. The parent needs none here."""
    monkeypatch.setattr(spawner, "Transfers", lambda: None)
    # The agent waits for its NIXL process, however long that takes.
    patient = "from omni_actors.cluster import transfers; transfers.START_S = 60.0"
    (tmp_path / "sitecustomize.py").write_text(patient)
    late = f"import time; time.sleep({1.25 * LEASE_S}); raise ImportError('libcudart.so is missing')"
    (tmp_path / f"{PACKAGE}.py").write_text(late)
    agents = SubprocessAgents({"a": ["env", f"PYTHONPATH={tmp_path}:{Path(__file__).parents[2]}"]})
    with pytest.raises(ClusterUnavailable, match=r"'a' cannot be used: NIXL .*: ImportError: libcudart\.so is"):
        async with open_cluster(named("a"), agents, FixedPlaces({}), transport="nixl", lease_s=LEASE_S):
            raise AssertionError("it was opened")


def test_nixl_that_cannot_start_leaves_nothing(no_package: None) -> None:
    before = open_descriptors()
    with pytest.raises(NixlUnavailable, match=EXTRA):
        Transfers()
    assert open_descriptors() == before


def test_a_pump_without_nixl_does_not_load_it() -> None:
    code = f"import sys, omni_actors.cluster.agent; sys.exit({PACKAGE!r} in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 20)), max_size=60))
def test_extents_do_not_overlap_and_all_comes_back(steps: list[tuple[int, int]]) -> None:
    """Each step takes an extent, and gives one back. An extent that is refused has no gap that is large enough."""
    extents, taken = Extents(64, 2048), dict[int, int]()
    for size, victim in steps:
        begin = extents.take(size)
        used = {byte for at, length in taken.items() for byte in range(at, at + length, 64)}
        free = [at for at in range(64, 64 + 2048, 64) if at not in used]
        rounded = size + -size % 64
        fits = [at for at in free if set(range(at, at + rounded, 64)) <= set(free)]
        assert begin == (fits[0] if fits else None)
        if begin is not None:
            taken[begin] = rounded
        if taken and victim < len(taken):
            given_back = list(taken)[victim]
            extents.give(given_back)
            del taken[given_back]
    for begin in taken:
        extents.give(begin)
    assert extents.take(2048) == 64
