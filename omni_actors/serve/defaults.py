"""The defaults of the command line and of ``serve``. Imports nothing."""

from __future__ import annotations

HOST = "127.0.0.1"
PORT = 8091
MAX_BODY_BYTES = 32 * 1024 * 1024
DRAIN_S = 5.0
MAX_CONNECTIONS = 1024
MAX_CONNECTIONS_PER_ADDRESS = 512
API_KEY_VARIABLE = "OMNI_ACTORS_API_KEY"
"""The environment variable from which the command takes the API key."""
