"""The API key: what one may look like, and whether a request holds it. Imports nothing of the web stack."""

from __future__ import annotations

import hmac
from collections.abc import Iterable


def normalize_key(given: str) -> str:
    """Return the key without the whitespace around it: a file's content often ends in a newline.

    Raises ValueError for a key that is empty, or that no Authorization header can carry.
    """
    key = given.strip()
    if not key:
        raise ValueError("an empty API key: None serves everybody")
    if not (key.isascii() and key.isprintable()):
        raise ValueError("an API key may have printable ASCII characters only")
    return key


def has_valid_key(headers: Iterable[tuple[bytes, bytes]], key: str | None) -> bool:
    """Whether the headers of a request carry the key. Always true where there is none."""
    if key is None:
        return True
    given = next((value for name, value in headers if name.lower() == b"authorization"), b"")
    scheme, _, token = given.partition(b" ")
    # Bytes of any length, compared in constant time.
    return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), key.encode())
