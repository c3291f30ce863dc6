"""SIGKILL of the stages on vLLM at every tenth output: the client gets one continuous answer (``killed_stages``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from omni_actors import OmniSystem
from tests.support.killed_stages import DTYPES, IN_TURN, Killed, kill_at_every_tenth_output
from tests.support.killed_vllm import OmniOnVLLM, VoiceOnVLLM
from tests.support.shared_system import SharedSystem

pytestmark = pytest.mark.timeout(900)

ON_VLLM = {"qwen3": ("thinker", "talker"), "qwen2_5": ("thinker",), "voice": ("llm",)}


@pytest.fixture(scope="module")
def opened(
    request: pytest.FixtureRequest, fixture_processes: set[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Killed, SharedSystem]]:
    """A running pipeline in one configuration."""
    name, configuration = request.param
    root = tmp_path_factory.getbasetemp() / "killed_stages"
    root.mkdir(exist_ok=True)
    killed = VoiceOnVLLM(configuration) if name == "voice" else OmniOnVLLM(configuration, name, root)
    with killed.running(fixture_processes) as shared_system:
        yield killed, shared_system


TRIES = 3
CASES = [
    pytest.param((name, configuration), stage, id=f"{name}-{configuration}-{stage}")
    for name, stages in ON_VLLM.items()
    for configuration in DTYPES
    for stage in (*stages, IN_TURN)
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("opened", "stage"), CASES, indirect=["opened"])
def test_a_stage_killed_at_every_tenth_output(
    opened: tuple[Killed, SharedSystem], stage: str, record_property: Callable[[str, object], None]
) -> None:
    kill_at_every_tenth_output(*opened, stage, record_property)


@pytest.mark.parametrize("opened", [pytest.param(("qwen3", "noisy"), id="qwen3-noisy")], indirect=True)
def test_thinker_and_talker_killed_in_the_middle_of_an_answer(opened: tuple[Killed, SharedSystem]) -> None:
    killed, shared_system = opened

    async def work(omni: OmniSystem) -> None:
        # Early, so that neither is done: a stage that has finished the request has nothing to resume. One may have
        # finished nevertheless, if this process stands still.
        for _ in range(TRIES):
            counts = await killed.kill(omni, [(10, "thinker"), (5, "talker")], killed.greedy)
            assert counts["kills"] == 2
            if counts["resumed"] == 2:
                return
        pytest.fail(f"a death did not end in a resume: {counts}")

    shared_system.run(work)
