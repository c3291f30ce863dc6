"""The keys and values of a prompt on their way from a stage that prefills to one that decodes.

Wire: the chunks of one request, in order. A *block* is what one forward of the prefill has computed, and travels in one
chunk, or in several with some layers each (the option ``chunk_layers``).

chunk               tensors                                          data
------------------  -----------------------------------------------  ---------------------------------------------
every one           ``keys``, ``values``: (layers of the chunk,      ``{}``
                    heads, positions of the block, head size)
first of a request  ``tokens``: int64 (n,), -1 where the prompt has  ``prompt``: the fields of ``PromptHeader``
                    an embedding only; what the family adds
first of a block    ``rows``: (positions, hidden), for a talker,     ``{}``
                    if the family has one
last                ``logits``: (vocabulary,), of the last position  ``{}``

Rules
1. Layers come in order, and blocks in order of position. So a block is complete with its last layer.
2. The number of chunks and their shapes follow from the prompt and the options alone, not from the prefix cache. So an
   incarnation that starts again sends the same chunks, up to rounding, and the consumer takes those that it lacks.
3. The receiver checks each chunk against its own model, and copies it to host memory. It refuses a request whose prompt
   was computed with another version of the weights: for now, because the stages get new weights one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from omni_actors.stages.autoregressive.cache import KeyValues
from omni_actors.stages.autoregressive.prefixes import Block
from omni_actors.stages.base import CLIENT, Chunk, InvalidRequest, StageRequest, TemporarilyRefused
from omni_actors.stages.bounds import Positive
from omni_actors.stages.refusal import validated
from omni_actors.stages.tensors import to_torch, to_wire
from ringbuf import Tensor as WireTensor

PARAM, MISMATCH = "prompt", "prefill_mismatch"
"""The parameter and the code of errors about a prompt that another stage has computed."""
OTHER_WEIGHTS = "weights_version_mismatch"
"""The code of a refusal for now: the stages have different versions of the weights."""


class StatesShape(NamedTuple):
    """What a model computes of one position. vocabulary: the number of logits. dtype: as torch names it."""

    layers: int
    heads: int
    size: int
    vocabulary: int
    dtype: str

    @property
    def position_bytes(self) -> int:
        """The bytes of the keys and values of one position."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return 2 * self.layers * self.heads * self.size * itemsize

    @classmethod
    def of(cls, config: Any, output: Any, dtype: torch.dtype) -> StatesShape:
        """Return that of a model. config: of its language model. output: its output layer."""
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        name = str(dtype).removeprefix("torch.")
        return cls(config.num_hidden_layers, heads, size, output.out_features, name)


class PromptHeader(msgspec.Struct, frozen=True):
    """What comes once. weights_version: None: the weights that were loaded at the start."""

    positions: Positive
    weights_version: str | None = None
    embedded: bool = False
    """Whether the client has sent embeddings in place of tokens."""
    delta: float = 0.0
    """For a thinker: rotary position minus index, of positions after the prompt."""


class _HeaderData(msgspec.Struct, frozen=True):
    prompt: PromptHeader | None = None


def header_of(
    header: PromptHeader, tokens: Sequence[int | None], extra: Mapping[str, Tensor]
) -> tuple[Mapping[str, Any], dict[str, WireTensor]]:
    """Return the data and the tensors that a request's first chunk has besides keys and values."""
    tensors = {"tokens": torch.tensor([-1 if token is None else token for token in tokens]), **extra}
    return {"prompt": msgspec.to_builtins(header)}, {name: to_wire(tensor) for name, tensor in tensors.items()}


def block_tensors(states: KeyValues, layers: int) -> Iterator[dict[str, WireTensor]]:
    """Yield the keys and values of a block, ``layers`` layers at a time (0: all). The tensors are new."""
    step = layers or len(states)
    for first in range(0, len(states), step):
        keys, values = zip(*states[first : first + step], strict=True)
        yield {
            "keys": to_wire(torch.stack(keys), deferred=True),
            "values": to_wire(torch.stack(values), deferred=True),
        }


def require_consumer(request: StageRequest) -> None:
    """Refuse a request of a stage that prefills, if no stage decodes. Raises InvalidRequest."""
    if not request.downstream:
        raise InvalidRequest("the stage computes prompts for a stage that decodes, and none takes part")


def require_one_source(request: StageRequest) -> None:
    """Refuse a request of a stage that decodes, unless one stage sends it the prompt. Raises InvalidRequest."""
    if len(request.sources) != 1 or CLIENT in request.sources:
        found = ", ".join(request.sources)
        raise InvalidRequest(f"a stage that decodes has one source, a stage that prefills; found {found}")


class ReceivedPrompt:
    """Collects the chunks of one request. ``open`` reads the first one's header; ``feed`` then takes every chunk.

    shape: of this stage's model. weights_version: of this stage.
    """

    def __init__(self, shape: StatesShape, weights_version: str | None) -> None:
        self._shape, self._version = shape, weights_version
        self.header: PromptHeader | None = None
        self.tokens: list[int | None] = []
        self.extra: dict[str, Tensor] = {}
        """The family's tensors of the first chunk, by name."""
        self.logits: Tensor | None = None
        """The logits of the last position, (1, vocabulary), once all has arrived."""
        self.after_prompt = 0
        """Tokens of the journal, which are ready to be computed once the prompt is complete."""
        self._arrived = self._taken = 0
        """Positions that have arrived with all their layers, and those that were taken."""
        self._layers: list[tuple[Tensor, Tensor]] = []
        """The layers that have arrived of an incomplete block."""
        self._rows: Tensor | None = None
        self._blocks = deque[Block]()
        """The blocks that have arrived and were not taken."""
        self._position_bytes = 0
        """The bytes of a position: keys, values and the row for a talker."""

    @property
    def left(self) -> int:
        """The positions that were not taken."""
        assert self.header is not None, "the first chunk has arrived"
        return self.header.positions - self._taken

    @property
    def left_bytes(self) -> int:
        """The bytes that the rest of the prompt takes until it is taken, whether it has arrived or not; 0 at first."""
        return 0 if self.header is None else self.left * self._position_bytes

    def open(self, chunk: Chunk) -> PromptHeader:
        """Return what the first chunk says of the prompt. Only its small tensors are copied.

        Raises InvalidRequest, TemporarilyRefused.
        """
        header = validated(chunk.data, _HeaderData).prompt
        if header is None:
            raise _mismatch("the first chunk says nothing of the prompt")
        if header.weights_version != self._version:
            found, own = header.weights_version or "0", self._version or "0"
            message = (
                f"the prompt was computed with version {found!r} of the weights; the stage that decodes has {own!r}"
            )
            raise TemporarilyRefused(message, code=OTHER_WEIGHTS)
        tokens = _tensor(chunk, "tokens", (header.positions,), "int64").tolist()
        if unknown := [token for token in tokens if token >= self._shape.vocabulary]:
            raise _mismatch(f"tokens: the model has no token {unknown[0]}; it has {self._shape.vocabulary}")
        self.tokens = [None if token < 0 else token for token in tokens]
        own_names = {"keys", "values", "tokens", "rows", "logits"}
        self.extra = {name: to_torch(tensor) for name, tensor in chunk.tensors.items() if name not in own_names}
        rows = chunk.tensors.get("rows")
        self._position_bytes = self._shape.position_bytes + (rows.nbytes // max(1, rows.shape[0]) if rows else 0)
        self.header = header
        return header

    def feed(self, chunk: Chunk) -> int:
        """Take a chunk. Return how many positions are complete with it. Raises InvalidRequest."""
        before = self._arrived
        self._take_layers(chunk)
        if chunk.last:
            self._take_end(chunk)
        elif self._arrived == self.left + self._taken:
            raise _mismatch("the logits of the last position are missing")
        return self._arrived - before

    def take(self, count: int) -> Block:
        """Take the next ``count`` positions, which must have arrived."""
        blocks, size = list[Block](), 0
        while size < count:
            blocks.append(self._blocks.popleft())
            size += blocks[-1].size
        taken = blocks[0] if len(blocks) == 1 else _joined(blocks)
        if size > count:
            self._blocks.appendleft(_part(taken, slice(count, size)))
            taken = _part(taken, slice(count))
        self._taken += count
        return taken

    def _take_layers(self, chunk: Chunk) -> None:
        shape, header = self._shape, self.header
        assert header is not None, "it was taken"
        sent = chunk.tensors.get("keys")
        found = tuple(sent.shape) if sent is not None else ()
        fits = len(found) == 4 and 0 < found[0] <= shape.layers - len(self._layers)
        if not fits or not 0 < found[2] <= header.positions - self._arrived:
            raise _mismatch(f"keys: found the shape {found}; the model has {shape}")
        if self._layers and found[2] != self._layers[0][0].shape[1]:
            raise _mismatch("keys: the layers of a block have different numbers of positions")
        expected = found[0], shape.heads, found[2], shape.size
        keys, values = (_tensor(chunk, name, expected, shape.dtype) for name in ("keys", "values"))
        if not self._layers and "rows" in chunk.tensors:
            self._rows = to_torch(chunk.tensors["rows"])
        self._layers += zip(keys, values, strict=True)
        if len(self._layers) == shape.layers:
            self._blocks.append(Block(self._layers, self._rows))
            self._layers, self._rows = [], None
            self._arrived += found[2]

    def _take_end(self, chunk: Chunk) -> None:
        header = self.header
        if header is None or self._layers or self._arrived != header.positions:
            raise _mismatch("the keys and values of the prompt are incomplete")
        self.logits = _tensor(chunk, "logits", (self._shape.vocabulary,), None)[None]


def _joined(blocks: Sequence[Block]) -> Block:
    layers = zip(*(block.states for block in blocks), strict=True)
    states = [tuple(torch.cat(each, dim=1) for each in zip(*layer, strict=True)) for layer in layers]
    rows = [block.rows for block in blocks if block.rows is not None]
    return Block([(keys, values) for keys, values in states], torch.cat(rows) if rows else None)


def _part(block: Block, part: slice) -> Block:
    states = [(keys[:, part], values[:, part]) for keys, values in block.states]
    return Block(states, None if block.rows is None else block.rows[part])


def _tensor(chunk: Chunk, name: str, shape: tuple[int, ...], dtype: str | None) -> Tensor:
    """Return a copy of a tensor in host memory. Raises InvalidRequest: it is missing, or is not as expected."""
    sent = chunk.tensors.get(name)
    found = None if sent is None else (sent.dtype, tuple(sent.shape))
    fits = sent is not None and (sent.dtype == dtype if dtype else "float" in sent.dtype)
    if sent is None or not fits or tuple(sent.shape) != shape:
        raise _mismatch(f"{name}: found {found}; expected {dtype or 'floats'} {shape}")
    return to_torch(sent)


def _mismatch(message: str) -> InvalidRequest:
    return InvalidRequest(f"the stages that prefill and decode do not fit: {message}", param=PARAM, code=MISMATCH)
