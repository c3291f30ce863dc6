"""The checks that any operating system allows: Python, the system itself, and the port. ``linux`` has the others."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Iterator

from omni_actors.cli.doctor.findings import Finding, error, ok, warning
from omni_actors.serve.settings import DEFAULTS

OLDEST_PYTHON = (3, 11)


def is_linux() -> bool:
    """Return whether this is Linux. The runtime cannot be imported elsewhere."""
    return platform.system() == "Linux"


def check(port: int = DEFAULTS.port) -> Iterator[Finding]:
    """Yield what the machine has. port: the one that a server would listen on."""
    yield _python()
    yield _system()
    yield _port(port)
    if is_linux():
        from omni_actors.cli.doctor import linux  # imports modules that other systems lack

        yield from linux.check()


def _python() -> Finding:
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info < OLDEST_PYTHON:
        return error("machine", "Python", found, "install Python 3.11 or newer")
    return ok("machine", "Python", found)


def _system() -> Finding:
    found = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if not is_linux() or platform.machine() != "x86_64":
        return error("machine", "system", found, "use Linux on x86-64: rings need its order of stores")
    return ok("machine", "system", found)


def _port(port: int) -> Finding:
    name = f"port {port}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((DEFAULTS.host, port))
            probe.listen()
        except OSError as failure:
            found = os.strerror(failure.errno or 0)
            return warning("machine", name, found, f"serve on another port: --port {port + 1}")
    return ok("machine", name, "free")
