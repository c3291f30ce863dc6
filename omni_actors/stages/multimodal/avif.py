"""AVIF files, which are decoded in a process with limits (``avif_process.py``).

A file of 600 KB can have a thousand pictures that no viewer shows, and the decoder computes them all in one call: more
than 20 s. Its container has too many forms to count them before.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from omni_actors.stages.multimodal import avif_process
from omni_actors.stages.multimodal.limits import Deadline

_PROGRAM = Path(avif_process.__file__)


class TooLarge(Exception):
    """The picture has too many pixels: ``width`` × ``height``."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        super().__init__(width, height)


def is_avif(data: bytes) -> bool:
    """Return whether Pillow may take a file for AVIF."""
    return data[4:8] == b"ftyp"


def as_png(data: bytes, index: int, max_pixels: int, deadline: Deadline) -> bytes:
    """Return the first picture of an AVIF file as a PNG file, with its EXIF data.

    index: the number of the image in the request, for errors. max_pixels: the limit of width × height. deadline: of the
    request.
    Raises TooLarge, InvalidRequest (the time is over), ValueError (the file cannot be read).
    """
    command = [sys.executable, "-I", str(_PROGRAM), str(max_pixels)]
    try:
        done = subprocess.run(
            command,
            input=data,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            timeout=deadline.left_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise deadline.error("image", index) from error
    if done.returncode == avif_process.TOO_LARGE:
        raise TooLarge(*map(int, done.stdout.split()))
    if done.returncode:
        raise ValueError(f"the decoder of AVIF ended with exit code {done.returncode}")
    return done.stdout
