"""Files of sound, written while the sound arrives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trio

from omni_actors.outputs import AudioChunk

SOUND_SUFFIXES = (".flac", ".mp3", ".ogg", ".wav")
"""File formats of ``Generation.save`` for sound."""


class SoundWriter:
    """Writes sound to a file chunk by chunk, as 16-bit samples or compressed. The first chunk creates the file.

    Args:
        path: The file. Its suffix chooses the format, see ``SOUND_SUFFIXES``.

    Raises:
        ValueError: The suffix names no known format.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: Any = None
        if self._path.suffix.lower() not in SOUND_SUFFIXES:
            known = ", ".join(SOUND_SUFFIXES)
            raise ValueError(f"{self._path}: {self._path.suffix!r} is not a sound format; accepted: {known}")

    def __enter__(self) -> SoundWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    async def write(self, chunk: AudioChunk) -> None:
        """Append ``chunk``. A WAV file is valid after each chunk. Not cancellable while a thread writes.

        Raises OSError or soundfile.LibsndfileError if the file cannot be written.
        """
        await trio.to_thread.run_sync(self._write, chunk)

    def _write(self, chunk: AudioChunk) -> None:
        import soundfile  # takes 50 ms; most systems write no file

        if self._file is None:
            is_new = not self._path.exists()
            try:
                self._file = soundfile.SoundFile(self._path, "w", chunk.sample_rate, channels=1)
            except soundfile.LibsndfileError:
                if is_new:  # the format may not have the rate, which is found when the file is made
                    self._path.unlink(missing_ok=True)
                raise
        self._file.write(chunk.samples)
        self._file.flush()
