"""A conversation: what was said, what is attached to the next message, and the files it is saved to."""

from __future__ import annotations

import base64
import mimetypes
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from omni_actors.errors import OmniError

SOUND_FORMATS = ("wav", "mp3", "flac", "ogg")
"""Formats of sound files in a conversation: OpenAI's, and two more of this project's server."""
MAX_BYTES = 31 * 2**20
"""The largest conversation, in bytes as it is sent, that a file may lead to. A server accepts 32 MiB by default."""
DETACH = "/detach drops the files and keeps the text"


class CannotAttach(OmniError):
    """A file cannot be a part of a conversation."""


class _File(NamedTuple):
    """name: of the file, without its folder. size: of its base64. part: of a message, in the form of the API."""

    name: str
    size: int
    part: dict[str, Any]


class _Message(NamedTuple):
    role: str
    text: str
    files: list[_File]

    def content(self) -> str | list[dict[str, Any]]:
        """Return what is sent."""
        text = [{"type": "text", "text": self.text}] if self.text else []
        return [*(file.part for file in self.files), *text] if self.files else self.text

    def words(self) -> str:
        """Return the text, after a mark for each file."""
        return " ".join([*(f"[{file.part['type']}]" for file in self.files), *([self.text] if self.text else [])])


class Conversation:
    """The messages of a conversation. Each is sent again with every later one, with its files."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        """The instructions to the model; "" if there are none."""
        self.attached: list[_File] = []
        """The files that go with the next message."""
        self._messages: list[_Message] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages to send, in the form of OpenAI's chat API: the instructions, and what was said."""
        return [{"role": each.role, "content": each.content()} for each in self._said()]

    def _said(self) -> list[_Message]:
        return [_Message("system", self.system, []), *self._messages] if self.system else self._messages

    def ask(self, text: str) -> None:
        """Add a message of the user, with what is attached."""
        self._messages.append(_Message("user", text, self.attached))
        self.attached = []

    def take_back(self) -> None:
        """Undo the last ``ask``: forget its message, and attach its files to the next one."""
        self.attached = self._messages.pop().files

    def answer(self, text: str, *, has_media: bool = False) -> None:
        """Add an answer. After one without text, sound and pictures, the question is taken back.

        has_media: whether it had sound or pictures. They are not sent again with the next message.
        """
        if text or has_media:
            self._messages.append(_Message("assistant", text, []))
        else:
            self.take_back()

    def reset(self) -> None:
        """Forget what was said and what is attached. The instructions stay."""
        self._messages, self.attached = [], []

    def files(self) -> str:
        """Return the names and sizes of all files that the next message is sent with; "" if there are none."""
        files = [*(file for each in self._messages for file in each.files), *self.attached]
        return ", ".join(f"{file.name} ({_mib(file.size)})" for file in files)

    def detach(self) -> None:
        """Forget the files, also those of earlier messages. The text stays, with marks where they were."""
        self._messages = [_Message(each.role, each.words(), []) for each in self._messages]
        self.attached = []

    def attach_sound(self, path: Path) -> None:
        """Attach a sound file to the next message. Raises CannotAttach."""
        format = path.suffix.removeprefix(".").lower()
        if format not in SOUND_FORMATS:
            raise CannotAttach(f"{path}: not a sound file; accepted: {', '.join(SOUND_FORMATS)}")
        data = self._base64(path)
        self._attach(path, data, {"type": "input_audio", "input_audio": {"data": data, "format": format}})

    def attach_picture(self, path: Path) -> None:
        """Attach a picture to the next message. Raises CannotAttach."""
        kind, _ = mimetypes.guess_type(path.name)
        if kind is None or not kind.startswith("image/"):
            raise CannotAttach(f"{path}: not a picture; accepted: png, jpg, webp, gif, …")
        data = self._base64(path)
        self._attach(path, data, {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}})

    def _attach(self, path: Path, data: str, part: dict[str, Any]) -> None:
        self.attached.append(_File(path.name, len(data), part))

    def _base64(self, path: Path) -> str:
        """Return a file as base64. Raises CannotAttach, also if the conversation would be too large with it."""
        try:
            if not path.is_file() and path.exists():  # a pipe would be waited for, and a device may have no end
                raise CannotAttach(f"{path}: not a file")
            self._check_room(path, (path.stat().st_size + 2) // 3 * 4)
            return base64.b64encode(path.read_bytes()).decode()
        except (OSError, ValueError) as error:
            raise CannotAttach(f"{path}: {reason_of(error)}") from error

    def _check_room(self, path: Path, size: int) -> None:
        """Raises CannotAttach: there is no room for a file. size: of its base64."""
        size += len(msgspec.json.encode(self.messages)) + sum(file.size for file in self.attached)
        if size > MAX_BYTES:
            files = self.files()
            others = f"; attached already: {files}; {DETACH}" if files else ""
            raise CannotAttach(f"{path}: {_mib(size)} would be sent with it, of at most {_mib(MAX_BYTES)}{others}")

    def save(self, path: Path) -> None:
        """Write the conversation: as JSON to a ``.json`` file, with its attachments; else as Markdown, without them.

        Raises OSError.
        """
        if path.suffix == ".json":
            path.write_bytes(msgspec.json.format(msgspec.json.encode({"messages": self.messages})) + b"\n")
        else:
            said = [f"**{each.role}:** {each.words()}\n" for each in self._said()]
            path.write_text("\n".join(said), encoding="utf-8")


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def reason_of(error: OSError | ValueError) -> str:
    """Return why a file cannot be used, without its path. ValueError: the path has a NUL character."""
    return getattr(error, "strerror", None) or str(error)
