"""Hatchling's build hook: a wheel contains the package ``ringbuf`` as ``omni_actors.ringbuf``.

In the source tree ``ringbuf`` is a package of its own. A wheel must not install it under that name, because an
unrelated distribution of the name installs a package ``ringbuf`` too. So the hook moves the package and rewrites the
imports of both packages. An editable install uses the source tree as it is.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MOVED = "ringbuf"
PARENT = "omni_actors"


class RingbufImportLeft(Exception):
    """A module imports ``ringbuf`` by a statement that the hook cannot rewrite."""

    def __init__(self, file: str, line: int) -> None:
        self.file, self.line = file, line
        accepted = f"'import {MOVED}' or 'from {MOVED}… import …', alone on a line"
        super().__init__(f"{file}:{line}: this import of {MOVED} cannot be rewritten; accepted: {accepted}")


class MoveRingbuf(BuildHookInterface):
    """Adds the moved and the rewritten files to a wheel; they replace the files of the source tree."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the changed files to a temporary directory. Raises RingbufImportLeft, which fails the build."""
        if version == "editable":
            return
        self._directory = TemporaryDirectory()
        root = Path(self.root)
        for source in sorted([*root.glob(f"{PARENT}/**/*.py"), *root.glob(f"{MOVED}/**/*.py")]):
            place = source.relative_to(root)
            text = source.read_text("utf-8")
            rewritten = rewrite_imports(text, str(place))
            if place.parts[0] == MOVED:
                place = PARENT / place
            elif rewritten == text:
                continue
            written = Path(self._directory.name) / place
            written.parent.mkdir(parents=True, exist_ok=True)
            written.write_text(rewritten, "utf-8")
            build_data["force_include"][str(written)] = str(place)
        build_data["force_include"][str(root / MOVED / "py.typed")] = f"{PARENT}/{MOVED}/py.typed"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete the temporary directory."""
        if version != "editable":
            self._directory.cleanup()


def rewrite_imports(text: str, file: str) -> str:
    """Return a module's text with its imports of ``ringbuf`` as imports of ``omni_actors.ringbuf``.

    Raises RingbufImportLeft: an import of ``ringbuf`` is left.
    """
    text = re.sub(rf"^( *)from {MOVED}(?=[. ])", rf"\1from {PARENT}.{MOVED}", text, flags=re.MULTILINE)
    text = re.sub(rf"^( *)import {MOVED}$", rf"\1from {PARENT} import {MOVED}", text, flags=re.MULTILINE)
    for node in ast.walk(ast.parse(text)):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        if any(name.partition(".")[0] == MOVED for name in names):
            raise RingbufImportLeft(file, node.lineno)
    return text
