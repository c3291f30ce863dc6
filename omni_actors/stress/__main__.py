"""``python -m omni_actors.stress [PIPELINE]``."""

from __future__ import annotations

from omni_actors.stress.command import stress_command

if __name__ == "__main__":
    stress_command(prog_name="python -m omni_actors.stress")
