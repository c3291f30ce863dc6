"""Live input from a process that the system did not spawn, through a named ring: examples/live_recording.py."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import soundfile
import trio

from omni_actors.errors import InputFailed
from omni_actors.system import OmniSystem
from ringbuf import PeerDied, Ring
from tests.support.echo_systems import read, two_stages
from tests.support.shared_system import SharedSystem, open_shared_system, with_shared_system

EXAMPLE = Path(__file__).parent.parent / "examples" / "live_recording.py"
LABEL = f"recording-{os.getpid()}"
RATE = 16_000

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared_system(fixture_processes: set[int]) -> Iterator[SharedSystem]:
    overrides = {"stages.first.accepts": ("script", "messages", "audio")}
    with open_shared_system(lambda: OmniSystem.open(two_stages(), overrides=overrides), fixture_processes) as system:
        yield system


def capture(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *command], env={**os.environ, "PYTHONPATH": str(EXAMPLE.parent.parent)})


def sounds(omni: OmniSystem, ring: Ring) -> Any:
    recorded = runpy.run_path(str(EXAMPLE))["recorded"]
    return read(omni.generate("What is it?", multi_modal_data={"audio": recorded(ring)}, modalities=("audio",)))


@with_shared_system
async def test_a_process_of_its_own_feeds_a_request(omni: OmniSystem) -> None:
    samples = (np.arange(RATE, dtype=np.int16) - 3000).astype(np.int16)
    with TemporaryDirectory() as directory, Ring.create_named(LABEL) as ring:
        file = f"{directory}/speech.wav"
        soundfile.write(file, samples, RATE)
        process = capture(str(EXAMPLE), "--name", LABEL, "capture", file)
        with trio.fail_after(60):
            outputs = await sounds(omni, ring)
            assert await trio.to_thread.run_sync(process.wait) == 0
    heard = [output.tensors["audio"].numpy() for output in outputs if "audio" in output.tensors]
    assert len(heard) > 1
    np.testing.assert_array_equal(np.concatenate(heard), samples / np.float32(32768))


@with_shared_system
async def test_the_death_of_the_capturing_process_ends_the_request(omni: OmniSystem) -> None:
    script = f"from ringbuf import Ring; import os; Ring.open({LABEL!r}).claim_producer(); os.kill(os.getpid(), 9)"
    with Ring.create_named(LABEL) as ring:
        process = capture("-c", script)
        with trio.fail_after(60), pytest.raises(InputFailed) as caught:
            await sounds(omni, ring)
        await trio.to_thread.run_sync(process.wait)
    assert isinstance(caught.value.__cause__, PeerDied)
    assert not [name for name in Ring.sweep_named() if name.endswith(f".{LABEL}")], "others' rings do not count"
