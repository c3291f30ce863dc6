"""msgspec's validation errors in plain words, for configuration files and for requests."""

from __future__ import annotations

import re

WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "object": "a mapping",
    "array": "a list",
}
"""The types of msgspec's messages."""


def split_path(error: Exception) -> tuple[str, str]:
    """Return the message of a validation error in plain words, and the path of the wrong value ("" for the whole).

    >>> split_path(ValueError("Expected `int`, got `str` - at `$.stages[0].size`"))
    ('expected an integer, got text', 'stages[0].size')
    >>> split_path(ValueError("Expected `str`, got `int` - at `key` in `$.env`"))
    ('expected text, got an integer, as a key', 'env')
    """
    text = str(error)
    if key := re.fullmatch(r"(.*) - at `key` in `\$(.*)`", text, re.DOTALL):
        return f"{plain(key[1])}, as a key", key[2].lstrip(".")
    # The last occurrence is msgspec's own: the value may contain the same words.
    message, found, path = text.rpartition(" - at `$")
    return (plain(message), path.rstrip("`").lstrip(".")) if found else (plain(text), "")


def plain(message: str) -> str:
    """Return a message of msgspec with its types in plain words.

    >>> plain("Expected `int` >= 1")
    'expected an integer >= 1'
    >>> plain("Expected `str | null`, got `int`")
    'expected text or null, got an integer'
    """
    if not message.startswith("Expected "):
        return message  # it may quote the value
    words = re.sub(r"`([^`]*)`", lambda names: " or ".join(WORDS.get(n, n) for n in names[1].split(" | ")), message)
    return f"e{words[1:]}"
