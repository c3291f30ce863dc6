"""Decode the sound of files that only FFmpeg may read (MP4, WebM, MP3, AAC, AVI, …), in a process with limits.

Rules
1. A file of a few bytes can claim millions of packets, and a parser in C can fail. So FFmpeg reads clients' files in a
   process of its own (``container_process.py``), which has limits of memory and time. Its end concerns one request.
2. The process gets the file at its standard input and an empty environment. FFmpeg may open no other file and no
   address in it.
3. Few of these processes run at the same time. They do not delay what libsndfile decodes, and containers do not delay
   MP3.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import trio

from omni_actors.outputs import AudioChunk
from omni_actors.serve.http.errors import HTTPError, bad_request
from omni_actors.serve.media import container_process

MAX_AUDIO_S = 600
MAX_SAMPLES = MAX_AUDIO_S * 48000
"""The limits of all audio in one request."""
DECODING_S = 20.0
"""The time limit of one file."""
CONTAINERS, FRAMES = trio.CapacityLimiter(2), trio.CapacityLimiter(2)
"""How many processes run, for containers and for MP3 or AAC without one."""
_PROGRAM = Path(container_process.__file__)


async def decode_container(
    data: bytes, param: str, *, max_s: float, max_samples: int, reason: str, limiter: trio.CapacityLimiter
) -> AudioChunk:
    """Return the first sound of a file: float32 (samples,), mono, at its own rate.

    Args:
        data: the file.
        param: the parameter that contains it.
        max_s: the longest sound in seconds.
        max_samples: the most samples.
        reason: why no other decoder reads the file.
        limiter: of the processes: ``CONTAINERS`` or ``FRAMES``.

    Raises HTTPError 400 about the parameter. Cancellation ends the process.
    """
    command = [sys.executable, "-I", str(_PROGRAM), str(max_s), str(max_samples)]
    done: subprocess.CompletedProcess[bytes] | None = None
    async with limiter:
        with trio.move_on_after(DECODING_S):
            done = await trio.run_process(
                command, stdin=data, capture_stdout=True, stderr=subprocess.DEVNULL, check=False, env={}
            )
    if done is None:
        message = f"{param}: decoding takes longer than {DECODING_S:g} s"
        raise bad_request(message, param, "invalid_audio")
    if done.returncode != 0:
        raise _refusal(done.returncode, param, reason)
    rate = int.from_bytes(done.stdout[: container_process.HEAD_BYTES], "little")
    return AudioChunk(np.frombuffer(done.stdout, np.float32, offset=container_process.HEAD_BYTES), rate)


def too_long(param: str) -> HTTPError:
    """Return the error for a recording beyond the limits of a request."""
    message = (
        f"{param}: too long; the recordings of a request may have {MAX_AUDIO_S} s and {MAX_SAMPLES} samples together"
    )
    return bad_request(message, param, "audio_too_long")


def _refusal(code: int, param: str, reason: str) -> HTTPError:
    """Return the error for an exit code of the process."""
    if code == container_process.TOO_LONG:
        return too_long(param)
    if code == container_process.EMPTY:
        return bad_request(f"{param}: the file has no audio", param, "invalid_audio")
    return bad_request(f"{param}: not a readable audio file: {reason}", param, "invalid_audio")
