"""The API key: its form, and whether a request carries it. Imports nothing of the web stack."""

from __future__ import annotations

import hmac
from collections.abc import Iterable


def normalize_key(given: str) -> str:
    """Return the key without surrounding whitespace: the content of a file often ends with a newline.

    Raises ValueError for a key that is empty or that no Authorization header can carry.
    """
    key = given.strip()
    if not key:
        raise ValueError("the API key is empty; use None to serve without a key")
    if not (key.isascii() and key.isprintable()):
        raise ValueError("an API key may contain printable ASCII characters only")
    return key


def has_valid_key(headers: Iterable[tuple[bytes, bytes]], key: str | None) -> bool:
    """Return whether the headers of a request carry ``key``. Always true if that is None."""
    if key is None:
        return True
    given = next((value for name, value in headers if name.lower() == b"authorization"), b"")
    scheme, _, token = given.partition(b" ")
    return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), key.encode())  # in constant time
