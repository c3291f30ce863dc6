"""Text that others have written, made harmless for a terminal."""

from __future__ import annotations

import re
from json import dumps

_CONTROL = (*range(32), *range(127, 160))
"""What moves the cursor, changes colours or titles, or answers as if the user had typed."""
_DIRECTION = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""What shows the letters of a line in another order than they have."""
_DROPPED = dict.fromkeys((*_CONTROL, *_DIRECTION))
_ESCAPED = {code: f"\\u{code:04x}" for code in _DROPPED}
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]")
_DROPPED_IN_LINES = {code: None for code in _DROPPED if chr(code) not in "\n\t"}


def clean(text: str, *, keep_lines: bool = False) -> str:
    """Return a text of a server or a model without the characters that control a terminal.

    keep_lines: leave line breaks, tabs and spaces as they are. Otherwise each run of them becomes one space, so that
    the text is one line.

    The result is plain text: print it without rich's markup, which would read "[red]" as a style.
    """
    return text.translate(_DROPPED_IN_LINES) if keep_lines else " ".join(text.split()).translate(_DROPPED)


def escape(json: str) -> str:
    """Return a JSON text in one line in which the same characters are written as escapes: its values stay."""
    return json.translate(_ESCAPED)


def encodable(json: str, encoding: str) -> str:
    """Return a JSON text of the same values that the encoding can write: if need be, in ASCII with escapes."""
    try:
        json.encode(encoding)
    except UnicodeEncodeError:
        return _BEYOND_ASCII.sub(lambda found: dumps(found[0])[1:-1], json)
    return json
