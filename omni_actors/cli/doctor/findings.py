"""What a check has found."""

from __future__ import annotations

from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report.

    Attributes:
        group: What the line belongs to: "machine", "kernel", "libraries", …
        name: What was looked at.
        status: "OK"; "warning": some pipelines do not work, or work slowly; "error": the runtime, or a pipeline that
            the user has named, does not work.
        found: What is there, in words.
        remedy: What to do; empty if the status is "OK".
    """

    group: str
    name: str
    status: Literal["OK", "warning", "error"]
    found: str
    remedy: str = ""


def ok(group: str, name: str, found: str) -> Finding:
    """Return a finding that needs no remedy."""
    return Finding(group=group, name=name, status="OK", found=found)


def warning(group: str, name: str, found: str, remedy: str) -> Finding:
    """Return a finding that concerns some pipelines."""
    return Finding(group=group, name=name, status="warning", found=found, remedy=remedy)


def error(group: str, name: str, found: str, remedy: str) -> Finding:
    """Return a finding that concerns every pipeline, or one that the user has named."""
    return Finding(group=group, name=name, status="error", found=found, remedy=remedy)
