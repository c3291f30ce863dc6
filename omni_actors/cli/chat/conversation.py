"""A conversation: what was said, what is attached to the next message, and the files it is saved to."""

from __future__ import annotations

import base64
import mimetypes
from pathlib import Path
from typing import Any

import msgspec

from omni_actors.errors import OmniError

SOUND_FORMATS = ("wav", "mp3", "flac", "ogg")
"""Formats of sound files in a conversation: OpenAI's, and two more of this project's server."""
MAX_FILE_BYTES = 24 * 2**20
"""A server accepts bodies of 32 MiB by default, and base64 takes a third more than the file."""


class CannotAttach(OmniError):
    """A file cannot be a part of a conversation."""


class Conversation:
    """The messages of a conversation, in the form of OpenAI's chat API."""

    def __init__(self, system: str = "") -> None:
        self.system = system
        """The instructions to the model; "" if there are none."""
        self.attached: list[dict[str, Any]] = []
        """The parts that go with the next message."""
        self._messages: list[dict[str, Any]] = []
        self._asked: list[dict[str, Any]] = []
        """The attached parts of the last message of the user."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages to send: the instructions, and what was said."""
        return [{"role": "system", "content": self.system}, *self._messages] if self.system else self._messages

    def ask(self, text: str) -> None:
        """Add a message of the user, with what is attached."""
        parts = [*self.attached, *([{"type": "text", "text": text}] if text else [])]
        self._asked = self.attached
        self._messages.append({"role": "user", "content": parts if self.attached else text})
        self.attached = []

    def take_back(self) -> None:
        """Undo the last ``ask``: forget its message, and attach its parts to the next one."""
        self._messages.pop()
        self.attached = self._asked

    def answer(self, text: str, *, has_media: bool = False) -> None:
        """Add an answer. After one without text, sound and pictures, the question is taken back.

        has_media: whether it had sound or pictures. They are not sent again with the next message.
        """
        if text or has_media:
            self._messages.append({"role": "assistant", "content": text})
        else:
            self.take_back()

    def reset(self) -> None:
        """Forget what was said and what is attached. The instructions stay."""
        self._messages, self.attached = [], []

    def attach_sound(self, path: Path) -> None:
        """Attach a sound file to the next message. Raises CannotAttach."""
        format = path.suffix.removeprefix(".").lower()
        if format not in SOUND_FORMATS:
            raise CannotAttach(f"{path}: not a sound file; accepted: {', '.join(SOUND_FORMATS)}")
        self.attached.append({"type": "input_audio", "input_audio": {"data": _base64(path), "format": format}})

    def attach_picture(self, path: Path) -> None:
        """Attach a picture to the next message. Raises CannotAttach."""
        kind, _ = mimetypes.guess_type(path.name)
        if kind is None or not kind.startswith("image/"):
            raise CannotAttach(f"{path}: not a picture; accepted: png, jpg, webp, gif, …")
        self.attached.append({"type": "image_url", "image_url": {"url": f"data:{kind};base64,{_base64(path)}"}})

    def save(self, path: Path) -> None:
        """Write the conversation: as JSON to a ``.json`` file, with its attachments; else as Markdown, without them.

        Raises OSError.
        """
        if path.suffix == ".json":
            path.write_bytes(msgspec.json.format(msgspec.json.encode({"messages": self.messages})) + b"\n")
        else:
            said = [f"**{each['role']}:** {_text(each['content'])}\n" for each in self.messages]
            path.write_text("\n".join(said), encoding="utf-8")


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return " ".join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in content)


def _base64(path: Path) -> str:
    try:
        if not path.is_file() and path.exists():  # a pipe would be waited for, and a device may have no end
            raise CannotAttach(f"{path}: not a file")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CannotAttach(f"{path}: larger than {MAX_FILE_BYTES // 2**20} MiB")
        return base64.b64encode(path.read_bytes()).decode()
    except (OSError, ValueError) as error:
        raise CannotAttach(f"{path}: {reason_of(error)}") from error


def reason_of(error: OSError | ValueError) -> str:
    """Return why a file cannot be used, without its path. ValueError: the path has a NUL character."""
    return getattr(error, "strerror", None) or str(error)
