"""``python -m tests.support.starving_server PIPELINE``: a server that starves a worker for ten minutes.

So a worker that runs again before was not starved to the end, however slow the machine is.
"""

from __future__ import annotations

from unittest import mock

from omni_actors.serve.command import serve_command
from omni_actors.serve.page import chaos

if __name__ == "__main__":
    with mock.patch.object(chaos, "STARVE_S", 600.0):
        serve_command()
