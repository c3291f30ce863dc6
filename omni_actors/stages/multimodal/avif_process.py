"""The program of the process that decodes one AVIF file; see ``multimodal.avif``.

It imports nothing of omni_actors, and runs as ``python -I avif_process.py PIXELS``. The file comes at standard input.
Standard output gets its first picture as a PNG file, with its EXIF data. Any exit code but 0 is a refusal.
"""

from __future__ import annotations

import ctypes
import io
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
TOO_LARGE = 3
"""The exit code for a picture of more than PIXELS. Standard output then has its width and height."""
MEMORY_BYTES = 4 << 30
CPU_S = 60
"""The parent has a limit too; this one is for a process whose parent ended before it had begun."""


def main() -> int:
    """Decode the file; return the exit code."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a worker that is killed leaves no process
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from PIL import AvifImagePlugin, Image  # after the limits

    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # each one keeps a picture
    Image.MAX_IMAGE_PIXELS = None
    with Image.open(io.BytesIO(sys.stdin.buffer.read()), formats=("AVIF",)) as image:
        if image.width * image.height > int(sys.argv[1]):
            sys.stdout.buffer.write(b"%d %d" % image.size)
            return TOO_LARGE
        exif = image.info.get("exif", b"")
        image.save(sys.stdout.buffer, "PNG", compress_level=0, exif=exif, icc_profile=None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
