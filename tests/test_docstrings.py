"""The examples in the docstrings of the public modules run, and print what the docstrings show.

Docstrings name what they describe.
"""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import trio

from omni_actors import OmniSystem

MODULES = (
    "omni_actors.aio",
    "omni_actors.config",
    "omni_actors.validation",
    "omni_actors.config.schema",
    "omni_actors.generation",
    "omni_actors.sync",
    "omni_actors.system.omni_system",
)
NAMES = {"OmniSystem": OmniSystem, "trio": trio}
"""What the examples may use without importing it."""
ROOT = Path(__file__).parents[1]
FRAGMENT = re.compile(r"((Of|That of|Those|By|Whose|See above)\b|When;)")
"""The beginning of a docstring that names nothing: "By worker." instead of "The reports of each worker."."""


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_give_what_they_show(name: str) -> None:
    result = doctest.testmod(import_module(name), extraglobs=NAMES)
    assert result.attempted > 0
    assert result.failed == 0


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring of a file, those of attributes included."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else ():
            match each:
                case ast.Expr(ast.Constant(str() as text)):
                    yield each.lineno, text.strip()


def test_no_docstring_begins_as_a_fragment() -> None:
    paths = [path for package in ("omni_actors", "ringbuf") for path in (ROOT / package).rglob("*.py")]
    assert paths
    found = [
        f"{path.relative_to(ROOT)}:{at}: {text[:60]}"
        for path in paths
        for at, text in docstrings(path)
        if FRAGMENT.match(text)
    ]
    assert found == []
