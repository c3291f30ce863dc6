"""The graph of a pipeline's stages."""

from __future__ import annotations

import pytest

from omni_actors.stage_graph import downstream_stages
from tests.supervisor.simulated_supervisor import DIAMOND


@pytest.mark.parametrize(
    ("stage", "downstream"),
    [("ear", {"mind", "voice", "face"}), ("eye", {"face"}), ("mind", {"voice", "face"}), ("face", set())],
)
def test_downstream_stages(stage: str, downstream: set[str]) -> None:
    assert set(downstream_stages([stage], DIAMOND)) == downstream
