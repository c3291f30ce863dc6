"""The code blocks of the README."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.partition("  #")[0].strip()
    for language, block in BLOCKS
    if language == "sh"
    for line in block.replace("\\\n", " ").splitlines()
]
PROGRAM, LISTENING = (block for language, block in BLOCKS if language == "python")
ASKED = next(command for command in COMMANDS if command.startswith("omni-actors"))
"""What `make demo` runs after setting up."""
