"""The text of a small pipeline file that is right, for tests that change it."""

from __future__ import annotations

GOOD = """\
name: two
stages:
  first:
    engine: echo
    accepts: [script]
  second:
    engine: echo
    inputs: [first]
    emits: audio
"""
