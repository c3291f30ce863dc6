"""The examples in the docstrings of the public modules run, and print what the docstrings show."""

from __future__ import annotations

import doctest
from importlib import import_module

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


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_give_what_they_show(name: str) -> None:
    result = doctest.testmod(import_module(name), extraglobs=NAMES)
    assert result.attempted > 0
    assert result.failed == 0
