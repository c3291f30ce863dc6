"""How much memory of its device a stage's model needs, read from the checkpoint before anything is loaded.

Rules
1. No weights are read. A safetensors file begins with the length of a header (8 bytes, little-endian), then comes the
   header: JSON with the dtype, the shape and the place of each tensor. Of a sharded checkpoint only the shards that the
   stage needs have to be present.
2. The count has the weights of the stage's part, in the dtype that the stage loads, and the full key-value cache:
   ``max_batch`` requests of ``context`` tokens. It leaves out what a forward needs while it runs, what a streaming
   decoder carries from chunk to chunk (some MB per request), and what libraries need (a CUDA context: some hundred MB).
3. Nothing is guessed: if the checkpoint lacks a figure, ``count`` raises ``Uncounted``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from omni_actors.stages.registry import ENGINES, EngineSpec

T = TypeVar("T")

FILES = ("model.safetensors", "diffusion_pytorch_model.safetensors")
"""Names of a checkpoint's file in one piece; a sharded one has an index of that name and ``INDEX``."""
INDEX = ".index.json"
HEADER_BYTES = 100_000_000
"""The longest header that the format allows."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Uncounted(ValueError):
    """The memory that a stage needs cannot be read from its checkpoint.

    directory: the checkpoint. reason: what is missing, in words.
    """

    def __init__(self, directory: Path, reason: str) -> None:
        self.directory, self.reason = directory, reason
        super().__init__(f"{directory}: {reason}")


class Memory(msgspec.Struct, frozen=True):
    """The memory that one worker needs, in bytes. cache: None for a stage without a context."""

    weights: int
    cache: int | None


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]

    def loaded_bytes(self, item_bytes: int) -> int:
        """Floating-point tensors are converted to the stage's dtype; others keep theirs."""
        if self.dtype.startswith(("F", "BF")):
            return math.prod(self.shape) * item_bytes
        return self.data_offsets[1] - self.data_offsets[0]


class _Loaded(msgspec.Struct, frozen=True):
    """Which tensors an engine loads: those that begin with ``prefix``, without those that begin with ``without``."""

    prefix: str
    without: tuple[str, ...]

    def among(self, names: Iterable[str]) -> Iterator[str]:
        """Return their names."""
        own = (name for name in names if name.startswith(self.prefix) and name != "__metadata__")
        return (name for name in own if not name.startswith(self.without))


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
    """Tensor name to shard file."""


class _Decoder(msgspec.Struct):
    """The fields of a config.json that determine the size of the key-value cache."""

    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None

    @property
    def values_per_token(self) -> int:
        """Numbers in the cache for each token: keys and values of all layers."""
        heads = self.num_key_value_heads or self.num_attention_heads
        return 2 * self.num_hidden_layers * heads * (self.head_dim or self.hidden_size // self.num_attention_heads)


def count(engine: str, directory: Path, options: Mapping[str, Any]) -> Memory:
    """Return the memory that one worker needs.

    engine: a name of the registry. directory: the checkpoint. options: the stage's effective options; without ``dtype``
    the weights count as float32, without ``context`` there is no cache.
    Raises Uncounted.
    """
    spec = ENGINES.get(engine)
    part = None if spec is None else spec.checkpoint_part
    if spec is None or part is None:
        raise Uncounted(directory, f"the parts of it that the engine {engine!r} loads are not known")
    item_bytes = ITEM_BYTES[options.get("dtype", "float32")]
    loaded = _Loaded(f"{part}." if part else "", _left_out(spec, directory))
    sizes = [tensor.loaded_bytes(item_bytes) for tensor in _tensors(directory / spec.checkpoint_folder, loaded)]
    if not sizes:
        raise Uncounted(directory, f"there are no weights of the part {part!r}")
    if "context" not in options:
        return Memory(sum(sizes), None)
    tokens = options["max_batch"] * options["context"]
    return Memory(sum(sizes), tokens * _decoder(directory, part).values_per_token * item_bytes)


def _left_out(spec: EngineSpec, directory: Path) -> tuple[str, ...]:
    try:
        return () if spec.checkpoint_leaves_out is None else spec.checkpoint_leaves_out(directory)
    except (OSError, ValueError, RecursionError) as error:
        raise Uncounted(directory, str(error)) from error


def _tensors(directory: Path, loaded: _Loaded) -> Iterator[_Tensor]:
    present = [name for name in FILES if (directory / name).exists()]
    shards = [directory / name for name in present[:1]]
    if not shards:  # libraries look for the two files in this order
        indices = [directory / f"{name}{INDEX}" for name in FILES if (directory / f"{name}{INDEX}").exists()]
        if not indices:
            raise Uncounted(directory, f"there is neither {FILES[0]} nor {FILES[0]}{INDEX}")
        placed = _read(indices[0], _Index).weight_map
        shards = [directory / name for name in sorted({placed[tensor] for tensor in loaded.among(placed)})]
    for shard in shards:
        header = _read(shard, dict[str, Any], header=True)
        yield from (_convert(shard, header[name], _Tensor) for name in loaded.among(header))


def _decoder(directory: Path, part: str) -> _Decoder:
    file = directory / "config.json"
    section = _read(file, dict[str, Any])
    if part:
        section = _convert(file, section.get(f"{part}_config"), dict[str, Any])
    return _convert(file, section.get("text_config", section), _Decoder)


def _read(file: Path, schema: type[T], *, header: bool = False) -> T:
    """Decode a JSON file, or with ``header`` the header of a safetensors file."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little") if header else -1
            if size > HEADER_BYTES:
                raise Uncounted(file.parent, f"{file.name}: this is not a safetensors file")
            return msgspec.json.decode(opened.read(size), type=schema)
    except FileNotFoundError as error:
        raise Uncounted(file.parent, f"there is no {file.name}") from error
    except (OSError, UnicodeError, msgspec.MsgspecError, RecursionError) as error:
        raise Uncounted(file.parent, f"{file.name}: {error}") from error


def _convert(file: Path, value: Any, schema: type[T]) -> T:
    try:
        return msgspec.convert(value, schema)
    except msgspec.ValidationError as error:
        raise Uncounted(file.parent, f"{file.name}: {error}") from error
