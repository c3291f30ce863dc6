"""What a stage's model takes of its device's memory, read from the checkpoint before anything is loaded.

Rules
1. No weights are read. A safetensors file begins with the length of a header (8 bytes, little-endian) and the header,
   JSON: of each tensor its dtype, its shape, and where it lies. Of a sharded checkpoint only the shards that the stage
   needs have to be there.
2. Counted are the weights of the stage's part in the dtype that the stage loads, and the key/value cache at full use:
   ``max_batch`` requests of ``context`` tokens. On top come what a forward needs while it runs, what a streaming
   decoder carries from chunk to chunk (some MB a request), and what libraries take (a CUDA context: some hundred MB).
3. Nothing is guessed: what the checkpoint does not say raises ``Uncounted``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["PARTS", "Memory", "Uncounted", "count"]

PARTS: dict[str, str] = {
    "llm": "",
    "qwen3_thinker": "thinker",
    "qwen3_talker": "talker",
    "qwen3_code2wav": "code2wav",
    "qwen2_5_thinker": "thinker",
    "qwen2_5_talker": "talker",
    "qwen2_5_token2wav": "token2wav",
}
"""By engine: what it loads of a checkpoint, the tensors whose names begin with this and a dot; "": all of them. In
``dtype``, or without that option in float32."""

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
HEADER_BYTES = 100_000_000
"""The longest header that the format allows."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Uncounted(ValueError):
    """A checkpoint does not say what a stage needs. directory: its own. reason: what is missing, in words."""

    def __init__(self, directory: Path, reason: str) -> None:
        self.directory, self.reason = directory, reason
        super().__init__(f"{directory}: {reason}")


class Memory(msgspec.Struct, frozen=True):
    """Of one worker, bytes. cache: None where the stage has no context."""

    weights: int
    cache: int | None


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]

    def loaded_bytes(self, item_bytes: int) -> int:
        """Floating-point numbers take the stage's dtype; others stay as they are stored."""
        if self.dtype.startswith(("F", "BF")):
            return math.prod(self.shape) * item_bytes
        return self.data_offsets[1] - self.data_offsets[0]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    """Tensor to shard."""


class _Decoder(msgspec.Struct):
    """Of a config.json, the part that attends to its own past."""

    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None

    @property
    def numbers_per_token(self) -> int:
        """In the cache: keys and values of each layer."""
        heads = self.num_key_value_heads or self.num_attention_heads
        return 2 * self.num_hidden_layers * heads * (self.head_dim or self.hidden_size // self.num_attention_heads)


def count(engine: str, directory: Path, options: Mapping[str, Any]) -> Memory:
    """What one worker of ``engine`` needs for the checkpoint in ``directory``. options: the effective ones.

    Raises Uncounted.
    """
    if engine not in PARTS:
        raise Uncounted(directory, f"what the engine {engine!r} loads of it is not known")
    part, item_bytes = PARTS[engine], ITEM_BYTES[options.get("dtype", "float32")]
    sizes = [tensor.loaded_bytes(item_bytes) for tensor in _tensors(directory, f"{part}." if part else "")]
    if not sizes:
        raise Uncounted(directory, f"there are no weights of the part {part!r}")
    if "context" not in options:
        return Memory(sum(sizes), None)
    tokens = options["max_batch"] * options["context"]
    return Memory(sum(sizes), tokens * _decoder(directory, part).numbers_per_token * item_bytes)


def _tensors(directory: Path, prefix: str) -> Iterator[_Tensor]:
    shards = [directory / SINGLE]
    if not shards[0].exists():  # in the order in which transformers looks
        if not (directory / INDEX).exists():
            raise Uncounted(directory, f"there is neither {SINGLE} nor {INDEX}")
        placed: dict[str, str] = _read(directory / INDEX, _Index).weight_map
        shards = [directory / name for name in sorted({placed[tensor] for tensor in _of(placed, prefix)})]
    for shard in shards:
        header: dict[str, Any] = _read(shard, dict[str, Any], header=True)
        yield from (_convert(shard, header[name], _Tensor) for name in _of(header, prefix))


def _of(names: Iterable[str], prefix: str) -> Iterator[str]:
    return (name for name in names if name.startswith(prefix) and name != "__metadata__")


def _decoder(directory: Path, part: str) -> _Decoder:
    file = directory / "config.json"
    section: dict[str, Any] = _read(file, dict[str, Any])
    if part:
        section = _convert(file, section.get(f"{part}_config"), dict[str, Any])
    decoder: _Decoder = _convert(file, section.get("text_config", section), _Decoder)
    return decoder


def _read(file: Path, schema: Any, *, header: bool = False) -> Any:
    """The JSON in ``file``; header: in the beginning of it, where it is a safetensors file."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little") if header else -1
            if size > HEADER_BYTES:
                raise Uncounted(file.parent, f"{file.name}: no safetensors file")
            return msgspec.json.decode(opened.read(size), type=schema)
    except FileNotFoundError as error:
        raise Uncounted(file.parent, f"there is no {file.name}") from error
    except (OSError, msgspec.MsgspecError) as error:
        raise Uncounted(file.parent, f"{file.name}: {error}") from error


def _convert(file: Path, value: Any, schema: Any) -> Any:
    try:
        return msgspec.convert(value, schema)
    except msgspec.ValidationError as error:
        raise Uncounted(file.parent, f"{file.name}: {error}") from error
