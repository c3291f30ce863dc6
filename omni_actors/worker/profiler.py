"""The profiler of one worker: torch's, of all its threads.

This module imports no torch: an engine that computes with it has loaded it.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from omni_actors.errors import InvalidRequest, Unsupported

WITHOUT_TORCH = "its engine does not compute with torch"


class WorkerProfiler:
    """Profiles what the engine computes from ``start`` to ``stop``. Both are called in the engine's thread.

    stage: the worker's stage.
    """

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._running: Any = None

    def start(self) -> None:
        """Begin a profile.

        Raises Unsupported without torch, and InvalidRequest if a profile runs, or torch's profiler raises.
        """
        if "torch" not in sys.modules:
            raise Unsupported(self._stage, "start_profile", WITHOUT_TORCH)
        if self._running is not None:
            raise InvalidRequest("a profile runs already", code="profile_runs")
        try:
            torch_profiler = importlib.import_module("torch.profiler")
            every_thread = torch_profiler._ExperimentalConfig(profile_all_threads=True)  # an engine may have others
            profile = torch_profiler.profile(
                activities=torch_profiler.supported_activities(), experimental_config=every_thread
            )
            profile.start()
        except Exception as error:
            raise _failed(error) from error
        self._running = profile

    def stop(self, folder: str) -> dict[str, Any]:
        """End the profile, and write it into ``folder`` as trace events. Return the ``file`` and this ``pid``.

        Raises InvalidRequest if no profile runs in this worker, the file cannot be written, or torch's profiler raises.
        None runs then.
        """
        if self._running is None:
            raise InvalidRequest("no profile runs in this worker", code="no_profile")
        profile, self._running = self._running, None
        pid = os.getpid()
        file = Path(folder, f"{pid}.json")
        try:
            profile.stop()
            file.touch()
            profile.export_chrome_trace(str(file))
        except OSError as error:
            raise InvalidRequest(f"the profile cannot be written: {error}", param="folder") from error
        except Exception as error:
            raise _failed(error) from error
        return {"file": str(file), "pid": pid}


def _failed(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"torch's profiler raised {type(error).__name__}: {error}", code="profiler_failed")
