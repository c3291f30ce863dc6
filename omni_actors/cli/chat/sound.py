"""What happens to the sound of an answer: it is written to a file, and played."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import trio

from omni_actors.cli.answer_events import SAMPLE_BYTES, SPEECH_RATE
from omni_actors.cli.running import helper_tasks, notes
from omni_actors.command_line import CannotWrite
from omni_actors.output_files import SoundWriter
from omni_actors.outputs import AudioChunk

PLAYERS = (
    ("aplay", "-q", "-t", "raw", "-f", "S16_LE", "-c", "1", "-r", str(SPEECH_RATE)),
    ("paplay", "--raw", "--format=s16le", "--channels=1", f"--rate={SPEECH_RATE}"),
    ("ffplay", "-loglevel", "error", "-nodisp", "-autoexit", "-f", "s16le", "-ar", str(SPEECH_RATE), "-i", "-"),
)
"""The programs that play samples from their standard input, as they come."""
WAITING_PIECES = 4096
"""Pieces of sound that wait for the player. It plays in real time, and an answer is faster."""


def find_player() -> tuple[str, ...] | None:
    """Return the command of the first player that this machine has; None if it has none."""
    return next((command for command in PLAYERS if shutil.which(command[0])), None)


class SoundSink:
    """Takes the sound of one answer.

    Args:
        file: The file to write; None: none.
        player: Where pieces for the player go; None: nothing is played.
    """

    def __init__(self, file: SoundWriter | None, player: trio.MemorySendChannel[bytes] | None) -> None:
        self._file, self._player = file, player
        self.failure: CannotWrite | None = None
        """Why the file has not all of the sound. The rest of the answer is still taken."""
        self._rest = b""
        """The first half of a sample."""

    async def write(self, data: bytes) -> None:
        """Take samples: 16-bit little-endian, mono, at ``SPEECH_RATE``. ``failure`` tells of a file that failed."""
        data = self._rest + data
        whole = len(data) - len(data) % SAMPLE_BYTES
        data, self._rest = data[:whole], data[whole:]
        if self._player is not None:
            await self._player.send(data)
        if self._file is not None and self.failure is None:
            samples = np.frombuffer(data, np.int16).astype(np.float32) * np.float32(1 / 32768)
            await self._write_file(AudioChunk(samples, SPEECH_RATE))

    async def _write_file(self, chunk: AudioChunk) -> None:
        import soundfile  # takes 50 ms; most conversations write no file

        assert self._file is not None
        try:
            await self._file.write(chunk)
        except (OSError, soundfile.LibsndfileError) as error:
            self.failure = CannotWrite("the spoken answer", error)


@asynccontextmanager
async def sound_sink(path: Path | None, player: tuple[str, ...] | None) -> AsyncIterator[SoundSink]:
    """Open the sink of one answer for the block. The block ends when everything has been played.

    path: the file to write. player: the command of a player. Cancellation ends the player at once.
    """
    async with AsyncExitStack() as stack:
        file = stack.enter_context(SoundWriter(path)) if path is not None else None
        channel = await stack.enter_async_context(_playing(player)) if player is not None else None
        yield SoundSink(file, channel)


@asynccontextmanager
async def _playing(command: tuple[str, ...]) -> AsyncIterator[trio.MemorySendChannel[bytes]]:
    send, receive = trio.open_memory_channel[bytes](WAITING_PIECES)
    async with helper_tasks() as nursery, send:
        nursery.start_soon(_play, command, receive)
        yield send


async def _play(command: tuple[str, ...], pieces: trio.MemoryReceiveChannel[bytes]) -> None:
    """Play pieces until their end. A player that ends early, because there is no sound card, costs only the sound.

    So does one that cannot be run, such as a program for another machine. A note tells of both.
    """
    quiet = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": False}
    apart = {"start_new_session": True}  # Ctrl-C stops an answer, and is no failure of its player
    async with trio.open_nursery() as nursery, pieces:
        try:
            process: trio.Process = await nursery.start(partial(trio.run_process, [*command], **quiet, **apart))
        except OSError as error:
            notes.print(f"{command[0]} cannot be run: {error.strerror}", style="yellow")
            async for _ in pieces:
                pass
            return
        assert process.stdin is not None
        has_player = True
        async with process.stdin:
            async for piece in pieces:
                if has_player:
                    try:
                        await process.stdin.send_all(piece)
                    except trio.BrokenResourceError:
                        has_player = False
        if code := await process.wait():
            how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
            notes.print(f"{command[0]} has failed ({how}): the sound may not have been played", style="yellow")
