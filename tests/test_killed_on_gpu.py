"""SIGKILL of stages that compute on a GPU: ``test_killed_stages`` says what is asked of an answer.

All stages are on one device, and the references that follow their answers compute on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from omni_actors import OmniSystem
from tests.support.closeness import assert_same_sound
from tests.support.killed_omni import REFERENCES, Omni, SplitOmni, checkpoint
from tests.support.killed_stages import DTYPES, IN_TURN, kill_at_every_tenth_output
from tests.support.on_gpu import ON_GPU
from tests.support.shared_system import SharedSystem

pytestmark = [*ON_GPU, pytest.mark.timeout(900)]

PIPELINES = {**{family: (Omni, family) for family in REFERENCES}, "qwen3_split": (SplitOmni, "qwen3")}
"""By name, with prefill apart from decode in the last one."""
CASES = [(name, configuration) for name in PIPELINES for configuration in DTYPES]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def opened(
    request: pytest.FixtureRequest, fixture_processes: set[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Omni, SharedSystem]]:
    name, configuration = request.param
    pipeline, family = PIPELINES[name]
    killed = pipeline(configuration, family, checkpoint(family, tmp_path_factory.mktemp("killed")), device="cuda:0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # the sound is compared with that of whole float32 numbers
        with killed.running(fixture_processes) as shared_system:
            yield killed, shared_system


def test_stages_killed_in_turn_at_every_tenth_output(
    opened: tuple[Omni, SharedSystem], record_property: Callable[[str, object], None]
) -> None:
    kill_at_every_tenth_output(*opened, IN_TURN, record_property)


def test_all_stages_killed_at_once(opened: tuple[Omni, SharedSystem]) -> None:
    killed, shared_system = opened

    async def work(omni: OmniSystem) -> None:
        expected = await killed.undisturbed(omni, killed.greedy)
        replays = 0
        while not replays:  # the stages may have finished before their deaths
            heard = await killed.hear(omni, killed.greedy, *killed.stages, at=20)
            assert heard.killed
            if killed.configuration == "exact":
                assert (heard.texts, heard.journals) == (expected.texts, expected.journals)
                assert_same_sound(heard.sound, expected.sound)
            else:
                killed.check(heard, killed.greedy)
            replays = heard.replays

    shared_system.run(work)
