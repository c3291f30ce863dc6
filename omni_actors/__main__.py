"""``python -m omni_actors`` is the command ``omni-actors``."""

from __future__ import annotations

from omni_actors.cli import main

if __name__ == "__main__":
    main(prog_name="omni-actors")
