"""How contexts travel from ``bagel_context`` to ``bagel_denoiser``: one chunk for each layer's keys and values.

A chunk has ``tensors["keys"]`` and ``tensors["values"]``, (heads, length, head size); and ``imageless_keys`` and
``imageless_values`` if that context is not a prefix. The first one also has ``tensors["noise"]`` and the header,
``data["context"]``. At the size of BAGEL-7B, a position takes 57 kB in all layers, and a picture to edit some 300 MB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from torch import Tensor

from omni_actors.stages.bagel.config import BagelConfig
from omni_actors.stages.bagel.contexts import Contexts, Mark
from omni_actors.stages.base import Chunk, InvalidRequest
from omni_actors.stages.refusal import validated
from omni_actors.stages.tensors import to_torch, to_wire
from ringbuf import Tensor as WireTensor

_NAMES = ("keys", "values"), ("imageless_keys", "imageless_values")


class Header(msgspec.Struct, frozen=True):
    """What comes once."""

    layers: int
    full: Mark
    textless: Mark
    imageless: Mark
    edits: bool
    width: int
    height: int


class _HeaderData(msgspec.Struct, frozen=True):
    context: Header


def chunks(contexts: Contexts) -> Iterator[tuple[Mapping[str, Any], Mapping[str, WireTensor]]]:
    """Yield data and tensors of each chunk. The tensors' memory is not shared with a cache that changes."""
    header = Header(
        layers=len(contexts.states),
        full=contexts.full,
        textless=contexts.textless,
        imageless=contexts.imageless,
        edits=contexts.edits,
        width=contexts.width,
        height=contexts.height,
    )
    for layer, (keys, values) in enumerate(contexts.states):
        tensors = {"keys": keys, "values": values}
        if contexts.imageless_states is not None:
            tensors["imageless_keys"], tensors["imageless_values"] = contexts.imageless_states[layer]
        data: Mapping[str, Any] = {}
        if not layer:
            tensors["noise"], data = contexts.noise, {"context": msgspec.to_builtins(header)}
        yield data, {name: to_wire(tensor) for name, tensor in tensors.items()}


class Receiver:
    """Collects the chunks of one request in host memory, and checks them against the model. config: the model's."""

    def __init__(self, config: BagelConfig) -> None:
        self._config = config
        self._header: Header | None = None
        self._noise: Tensor | None = None
        self._states: list[tuple[Tensor, Tensor]] = []
        self._imageless: list[tuple[Tensor, Tensor]] = []

    def feed(self, chunk: Chunk) -> Contexts | None:
        """Take a chunk. Return the contexts when they are complete. Raises InvalidRequest."""
        if "context" in chunk.data:
            self._header = self._checked(validated(chunk.data, _HeaderData).context)
            self._noise = self._tensor(chunk, "noise", self._noise_shape(self._header)).float()
        if chunk.tensors:  # a chunk without tensors is a piece of the model's own text
            self._take_layer(chunk)
        if not chunk.last:
            return None
        header, noise = self._header, self._noise
        if header is None or noise is None or len(self._states) != header.layers:
            raise InvalidRequest("the context of the picture is incomplete", param="context")
        if len(self._imageless) not in (0, header.layers):
            raise InvalidRequest("the context without images is incomplete", param="context")
        if not self._imageless and header.imageless.length > header.full.length:
            raise InvalidRequest("the context without images is longer than the full one", param="context")
        fields = {name: getattr(header, name) for name in header.__struct_fields__ if name != "layers"}
        return Contexts(states=self._states, imageless_states=self._imageless or None, noise=noise, **fields)

    def _take_layer(self, chunk: Chunk) -> None:
        header = self._header
        if header is None or len(self._states) == header.layers:
            raise InvalidRequest("a layer of a context was sent before its header, or behind the last", param="context")
        self._states.append(self._pair(chunk, _NAMES[0], header.full.length))
        if _NAMES[1][0] in chunk.tensors:
            self._imageless.append(self._pair(chunk, _NAMES[1], header.imageless.length))

    def _checked(self, header: Header) -> Header:
        """Return the header. Raises InvalidRequest: it does not fit the model."""
        unit, longest = self._config.token_pixels, self._config.longest_side
        sides = header.width, header.height
        fits = header.layers == self._config.language.num_hidden_layers and header.textless.length <= header.full.length
        if not fits or self._states or any(side % unit or not unit <= side <= longest for side in sides):
            raise InvalidRequest("the header of the context does not fit the model", param="context")
        return header

    def _noise_shape(self, header: Header) -> tuple[int, ...]:
        size = self._config.token_pixels
        return (header.height // size) * (header.width // size), self._config.token_channels

    def _pair(self, chunk: Chunk, names: tuple[str, str], length: int) -> tuple[Tensor, Tensor]:
        language = self._config.language
        shape = language.num_key_value_heads, length, language.head_size
        first, second = (self._tensor(chunk, name, shape) for name in names)
        return first, second

    def _tensor(self, chunk: Chunk, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a copy of a tensor. Raises InvalidRequest: it is missing, or has another shape."""
        if (sent := chunk.tensors.get(name)) is None:
            raise InvalidRequest(f"{name}: the context's chunk has no such tensor", param=name)
        if tuple(sent.shape) != shape or "float" not in sent.dtype:
            raise InvalidRequest(f"{name}: floats {shape} were expected, not {sent.dtype} {sent.shape}", param=name)
        return to_torch(sent)
