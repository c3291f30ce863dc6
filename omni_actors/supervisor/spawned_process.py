"""The interpreter of a worker process, started with multiprocess.

It never imports the parent's main module, so a user's script needs no ``if __name__ == "__main__"``.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from multiprocess import context, popen_spawn_posix, reduction, spawn, util

from omni_actors.worker.main import STOP_SIGNALS

NO_STATUS = 256
"""The exit code, for multiprocess, of a process whose exit status is lost. No process has this code."""


class _Popen(popen_spawn_posix.Popen):  # type: ignore[misc]
    """multiprocess's spawn, without the parent's main module, its arguments, and the resource tracker process."""

    def _launch(self, process_obj: Any) -> None:
        environment = process_obj.__dict__.pop("environment")  # not pickled
        preparation = spawn.get_preparation_data(process_obj.name)
        for name in ("init_main_from_name", "init_main_from_path", "sys_argv"):  # sys.argv may contain an API key
            preparation.pop(name, None)
        payload = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(preparation, payload)
            reduction.dump(process_obj, payload)
        finally:
            context.set_spawning_popen(None)
        child_read, parent_write = os.pipe()
        try:
            self._fds.append(child_read)
            command = spawn.get_command_line(tracker_fd=None, pipe_handle=child_read)
            self.pid = _execute(command, self._fds, environment)
        except BaseException:
            os.close(parent_write)
            raise
        finally:
            os.close(child_read)
        self.sentinel = parent_write
        self.finalizer = util.Finalize(self, os.close, (parent_write,))
        with suppress(BrokenPipeError):  # it is dead already, which its pidfd shows
            os.write(parent_write, payload.getbuffer())  # far below a pipe's buffer: one write, no waiting


def _execute(command: Sequence[str], fds: Sequence[int], environment: Mapping[str, str]) -> int:
    """Start a process that inherits ``fds`` and no other descriptor, and return its pid. Raises OSError."""
    variables = {**os.environ, **environment} if environment else None
    process = subprocess.Popen(
        command, executable=spawn.get_executable(), pass_fds=fds, env=variables, restore_signals=False
    )
    process.returncode = 0  # multiprocess reaps it; otherwise ``subprocess`` would try to, when this object is freed
    return process.pid


class SpawnedProcess(context.SpawnProcess):  # type: ignore[misc]
    """A process that multiprocess starts and waits for."""

    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:
        return _Popen(process_obj)

    def final_code(self) -> int | None:
        """Return the exit code, or the negative signal number, of a process that ``join`` has waited for.

        None: its exit status is lost, because this program ignores SIGCHLD or has reaped the process elsewhere.
        """
        code: int | None = self.exitcode
        if code is None:
            self._popen.returncode = NO_STATUS  # or ``close`` would take it for a running process
        return code


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Block the signals that a worker ignores until it does so: a child inherits the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
