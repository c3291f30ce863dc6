"""The profiler of a worker: what torch's profiler raises is a refusal of the call."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from omni_actors.errors import InvalidRequest
from omni_actors.worker.profiler import WorkerProfiler


class Profile:
    """torch's profiler, which raises where the test says."""

    raises_in: str | None = None

    def __init__(self, **options: object) -> None:
        pass

    def _call(self, method: str) -> None:
        if method == Profile.raises_in:
            raise RuntimeError("Kineto is in use")

    def start(self) -> None:
        self._call("start")

    def stop(self) -> None:
        self._call("stop")

    def export_chrome_trace(self, file: str) -> None:
        self._call("export_chrome_trace")


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> WorkerProfiler:
    torch_profiler = SimpleNamespace(_ExperimentalConfig=dict, profile=Profile, supported_activities=list)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(profiler=torch_profiler))
    monkeypatch.setitem(sys.modules, "torch.profiler", torch_profiler)
    return WorkerProfiler("here")


@pytest.mark.parametrize("method", ["start", "stop", "export_chrome_trace"])
def test_an_exception_of_torch_is_a_refusal_after_which_another_profile_may_begin(
    method: str, profiler: WorkerProfiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def profile() -> dict[str, object]:
        profiler.start()
        return profiler.stop(str(tmp_path))

    monkeypatch.setattr(Profile, "raises_in", method)
    with pytest.raises(InvalidRequest, match="raised RuntimeError: Kineto") as refused:
        profile()
    assert refused.value.code == "profiler_failed"
    monkeypatch.setattr(Profile, "raises_in", None)
    assert profile()["pid"] == os.getpid()


def test_a_folder_with_a_nul_is_refused(profiler: WorkerProfiler) -> None:
    profiler.start()
    with pytest.raises(InvalidRequest, match=r"null (byte|character)"):
        profiler.stop("\0")
