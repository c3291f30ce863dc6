"""Pictures in a terminal: coarse ones in a live display, and whole ones where the terminal can show them.

Any terminal with true colours shows two pixels in each cell: an upper half block has two colours. kitty and iTerm2 have
protocols of their own for whole pictures, and some terminals follow them. Others show sixels, as DEC's terminals did.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

import numpy as np
from rich.color import Color
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.style import Style

from omni_actors.outputs import Picture

COLUMNS, ROWS = 56, 20
"""The largest coarse picture, in cells."""
_SIXEL_SIDE, _SIXEL_COLOURS = 480, 128
"""The largest side of a picture in sixels, and the most colours: they need up to a character for each, and pixel."""
_RUN = re.compile(r"(.)\1{3,}")
"""Equal characters that sixels abbreviate."""
_KITTY_CHUNK = 4096
"""The most base64 characters of one command of kitty's protocol."""


class CoarsePicture:
    """A picture as half blocks, for ``rich``.

    Args:
        picture: The picture.
        columns: The most cells in a row.
        rows: The most rows of cells.
    """

    def __init__(self, picture: Picture, columns: int, rows: int) -> None:
        from PIL import Image  # only some installations have it

        scale = min(columns / picture.width, 2 * rows / picture.height)
        width, height = (max(1, round(side * scale)) for side in (picture.width, picture.height))
        image = Image.fromarray(picture.pixels).resize((width, height + height % 2), Image.Resampling.BOX)
        self._pixels = np.asarray(image).tolist()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for upper, lower in zip(self._pixels[::2], self._pixels[1::2], strict=True):
            for above, below in zip(upper, lower, strict=True):
                yield Segment("▀", _style(*above, *below))
            yield Segment.line()


@lru_cache(maxsize=4096)
def _style(*colours: int) -> Style:
    return Style(color=Color.from_rgb(*colours[:3]), bgcolor=Color.from_rgb(*colours[3:]))


def shows_coarse_pictures(console: Console) -> bool:
    """Return whether the console is a terminal with true colours."""
    return console.is_terminal and console.color_system == "truecolor"


def inline_encoder(environment: Mapping[str, str]) -> Callable[[Picture], str] | None:
    """Return what makes the characters by which a terminal shows a whole picture; None if it is not known to be able.

    environment: the variables by which terminals make themselves known.
    """
    if environment.get("TERM_PROGRAM") in ("iTerm.app", "WezTerm") or environment.get("LC_TERMINAL") == "iTerm2":
        return _iterm2
    if environment.get("TERM") in ("xterm-kitty", "xterm-ghostty") or "KITTY_WINDOW_ID" in environment:
        return _kitty
    if environment.get("TERM", "").startswith(("foot", "mlterm", "xterm-sixel")):
        return _sixel
    return None


def _iterm2(picture: Picture) -> str:
    """Return the command of iTerm2's protocol that shows a PNG file."""
    file = picture.encode("png")
    return f"\x1b]1337;File=inline=1;size={len(file)}:{base64.b64encode(file).decode()}\x07"


def _kitty(picture: Picture) -> str:
    """Return the commands of kitty's protocol that transmit a PNG file and show it."""
    encoded = base64.b64encode(picture.encode("png")).decode()
    parts = [encoded[begin : begin + _KITTY_CHUNK] for begin in range(0, len(encoded), _KITTY_CHUNK)]
    commands = []
    for number, part in enumerate(parts):
        keys = "a=T,f=100,q=2," if number == 0 else ""
        commands.append(f"\x1b_G{keys}m={int(number < len(parts) - 1)};{part}\x1b\\")
    return "".join(commands)


def _sixel(picture: Picture) -> str:
    """Return a picture, reduced, as sixels: each character has six pixels of a column in one colour."""
    from PIL import Image

    image = Image.fromarray(picture.pixels)
    image.thumbnail((_SIXEL_SIDE, _SIXEL_SIDE))
    reduced = image.quantize(_SIXEL_COLOURS)
    colours, shares = np.asarray(reduced), np.reshape(reduced.getpalette() or [], (-1, 3)) * 100 // 255
    written = [f'\x1bPq"1;1;{image.width};{image.height}']
    written += [f"#{number};2;{red};{green};{blue}" for number, (red, green, blue) in enumerate(shares)]
    for top in range(0, image.height, 6):
        band = colours[top : top + 6]
        bits = 1 << np.arange(len(band))[:, None]
        for number in np.unique(band):
            line = bytes((63 + np.where(band == number, bits, 0).sum(0)).astype(np.uint8)).decode()
            written.append(f"#{number}{_RUN.sub(_shortened, line)}$")
        written.append("-")
    return "".join(written) + "\x1b\\"


def _shortened(run: re.Match[str]) -> str:
    return f"!{len(run[0])}{run[1]}"
