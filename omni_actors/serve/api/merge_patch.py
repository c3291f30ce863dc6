"""JSON merge patches (RFC 7396): what turns one JSON document into another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the patch that turns ``before`` into ``after``; empty if they are equal. Neither may contain null.

    Objects are compared member by member; a list that differs is in the patch as a whole.
    """
    patch: dict[str, Any] = dict.fromkeys(before.keys() - after.keys())
    for name, value in after.items():
        known = before.get(name)
        if known == value:
            continue
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            patch[name] = merge_patch(known, value)
        else:
            patch[name] = value
    return patch


def apply_patch(document: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document that ``merge_patch`` made the patch for."""
    merged = dict(document)
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, Mapping):
            known = merged.get(name)
            merged[name] = apply_patch(known if isinstance(known, Mapping) else {}, value)
        else:
            merged[name] = value
    return merged
