"""Which libraries are installed."""

from __future__ import annotations

import importlib.util


def is_importable(library: str) -> bool:
    """Return whether a library has code. A mere folder of its name is found as a package without an origin."""
    spec = importlib.util.find_spec(library)
    return spec is not None and spec.origin is not None
