"""The program of the process that decodes one file with FFmpeg; see ``media.containers``.

It imports nothing of omni_actors, and runs as ``python -I container_process.py SECONDS SAMPLES``. The file comes at
standard input. Standard output gets the sample rate (``HEAD_BYTES``, little-endian) and the samples (float32, mono).
Any exit code but 0 is a refusal.
"""

from __future__ import annotations

import io
import resource
import sys
from typing import Any

HEAD_BYTES = 4
UNREADABLE, TOO_LONG, EMPTY = 3, 4, 5
"""Exit codes. A process that runs out of memory or time has others."""
CONTAINERS = (
    *("aac", "ac3", "aiff", "amr", "ape", "asf", "au", "avi", "caf", "eac3", "flac", "flv", "matroska", "mov"),
    *("mp3", "mpeg", "mpegts", "ogg", "tta", "w64", "wav", "webm", "wv"),
)
"""FFmpeg's names of the containers that are opened. None of them refers to other files, as playlists do."""
MEMORY_BYTES = 1 << 30
CPU_S = 10
_RATES = range(1000, 768_001)
"""Plausible sample rates."""


class _Refused(Exception):
    def __init__(self, code: int) -> None:
        self.code = code


def main() -> int:
    """Decode the file; return the exit code."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import av  # after the limits

    try:
        rate, sound = _decoded(av, sys.stdin.buffer.read(), float(sys.argv[1]), int(sys.argv[2]))
    except _Refused as error:
        return error.code
    except av.FFmpegError:
        return UNREADABLE
    sys.stdout.buffer.write(rate.to_bytes(HEAD_BYTES, "little"))
    sys.stdout.buffer.write(sound)
    return 0


def _decoded(av: Any, data: bytes, max_s: float, max_samples: int) -> tuple[int, bytearray]:
    """Return the sample rate, and the samples of the first sound."""
    options = {"format_whitelist": ",".join(CONTAINERS), "protocol_whitelist": ""}
    sound, rate, limit = bytearray(), 0, 0
    resampler: Any = None
    setup: tuple[Any, ...] = ()
    with av.open(io.BytesIO(data), options=options, metadata_errors="replace") as container:
        if not container.streams.audio:
            raise _Refused(EMPTY)
        for packet in container.demux(container.streams.audio[0]):
            for frame in _frames(av, packet):
                if not rate:
                    rate = frame.sample_rate
                    limit = 4 * min(max_samples, int(max_s * rate))
                if rate not in _RATES:
                    raise _Refused(UNREADABLE)
                found = (frame.sample_rate, frame.layout.name, frame.format.name)
                if found != setup:  # the first frame, or one of a damaged MP3
                    resampler, setup = av.AudioResampler("flt", "mono", rate), found
                for mono in resampler.resample(frame):
                    sound += bytes(mono.planes[0])[: 4 * mono.samples]
                if len(sound) > limit:
                    raise _Refused(TOO_LONG)
    if not sound:
        raise _Refused(EMPTY)
    return rate, sound


def _frames(av: Any, packet: Any) -> list[Any]:
    """Return the frames of a packet. A damaged one has none: the rest of a recording can still be heard."""
    try:
        found: list[Any] = packet.decode()
    except av.InvalidDataError:
        return []
    return found


if __name__ == "__main__":
    sys.exit(main())
