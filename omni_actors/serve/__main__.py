"""``python -m omni_actors.serve PIPELINE``."""

from __future__ import annotations

from omni_actors.serve.command import serve_command

if __name__ == "__main__":
    serve_command(prog_name="python -m omni_actors.serve")
