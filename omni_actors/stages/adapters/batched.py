"""Applies LoRA adapters to the forwards of a model: the rows of one batch may have different ones.

Rules
1. A forward hook of each linear layer adds the update of each row's adapter to the layer's output. A layer that no
   loaded adapter updates has no hook.
2. The update is computed in float32, as PEFT does, and for each row by itself (``bmm``). So it adds nothing to what
   makes a row depend on its neighbours.
3. An adapter stays loaded while a request uses it. Of the others, the pinned ones stay, and those that were used last.
   An adapter that is loaded again must have the same files as when it was added. A new worker loads no more than that.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from omni_actors.errors import InvalidAdapter
from omni_actors.stages.adapters import files, weights
from omni_actors.stages.adapters.options import Adapter, KeptAdapters
from omni_actors.stages.adapters.weights import LoraLayer


class BatchedAdapters:
    """The adapters of one model: an ``AdapterStore``.

    part: the part of an omni model that the model is; "": it has no parts. idle: how many adapters stay loaded that no
    request uses and that are not pinned. elsewhere: linear layers of the checkpoint that other stages have; what an
    adapter has for them is left out.
    """

    def __init__(self, model: nn.Module, *, part: str, idle: int, elsewhere: Collection[str] = ()) -> None:
        self._linears: dict[str, Any] = {
            name: module for name, module in model.named_modules() if hasattr(module, "in_features")
        }
        self._device = next((each.device for each in model.parameters()), torch.device("cpu"))
        self._part, self._idle, self._elsewhere = part, idle, elsewhere
        self._loaded: dict[Adapter, dict[str, LoraLayer]] = {}
        """The one that was used last comes last."""
        self._kept: set[Adapter] = set()
        """The adapters that requests may name."""
        self._pinned: set[Adapter] = set()
        self._hooks: dict[str, RemovableHandle] = {}
        self._rows = 0
        self._groups: list[tuple[list[int], dict[str, LoraLayer]]] = []
        """The rows of the present forward that have an adapter, by adapter."""

    def keep(self, kept: KeptAdapters, in_use: Collection[Adapter]) -> None:
        before, self._kept = self._kept, set(kept.adapters)
        self._pinned = {each for each in kept.adapters if each.name in kept.pinned}
        new = [each for each in kept.adapters if each not in before and each not in self._pinned]
        for adapter in (*new[max(0, len(new) - self._idle) :], *self._pinned):
            try:
                self._load(adapter)
            except InvalidAdapter as error:
                print(error, file=sys.stderr)
        self.trim(in_use)

    def use(self, adapter: Adapter, in_use: Collection[Adapter]) -> None:
        self._load(adapter)
        self.trim({adapter, *in_use})

    def trim(self, in_use: Collection[Adapter]) -> None:
        """Free the adapters that rule 3 does not keep."""
        removable = [each for each in self._loaded if each not in in_use and each not in self._pinned]
        idle = [each for each in removable if each in self._kept]
        surplus = idle[: max(0, len(idle) - self._idle)]
        for adapter in removable:
            if adapter in surplus or adapter not in self._kept:
                del self._loaded[adapter]
        self._hook()

    @property
    def loaded(self) -> Collection[Adapter]:
        return self._loaded.keys()

    @contextmanager
    def applied(self, adapters: Sequence[Adapter | None]) -> Iterator[None]:
        """Surround the forwards of a batch. adapters: of each row, which are in use.

        The inputs of every linear layer are (rows, …, inputs), or (rows x positions, inputs) in the order of the rows.
        """
        groups: dict[Adapter, list[int]] = {}
        for row, adapter in enumerate(adapters):
            if adapter is not None:
                groups.setdefault(adapter, []).append(row)
        self._rows = len(adapters)
        self._groups = [(rows, self._loaded[adapter]) for adapter, rows in groups.items()]
        try:
            yield
        finally:
            self._groups = []

    def _load(self, adapter: Adapter) -> None:
        layers = self._loaded.pop(adapter, None)
        if layers is None:
            shapes = {name: (linear.out_features, linear.in_features) for name, linear in self._linears.items()}
            layers = weights.load(
                files.read_again(adapter), shapes, self._part, self._device, elsewhere=self._elsewhere
            )
        self._loaded[adapter] = layers
        self._hook()

    def _hook(self) -> None:
        """Let exactly the layers that some loaded adapter updates have a hook."""
        needed = {path for layers in self._loaded.values() for path in layers}
        for path in self._hooks.keys() - needed:
            self._hooks.pop(path).remove()
        for path in needed - self._hooks.keys():
            self._hooks[path] = self._linears[path].register_forward_hook(partial(self._add, path))

    def _add(self, path: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Add the updates of one layer to its output."""
        for rows, layers in self._groups:
            if (layer := layers.get(path)) is not None:
                states = inputs[0].reshape(self._rows, -1, inputs[0].shape[-1])
                result = output.reshape(self._rows, -1, output.shape[-1])
                every = len(rows) == self._rows
                update = _update(states if every else states[rows], layer)
                if every:
                    result = (result + update).to(output.dtype)
                else:
                    result[rows] = (result[rows] + update).to(output.dtype)
                output = result.reshape(output.shape)
        return output


def _update(states: Tensor, layer: LoraLayer) -> Tensor:
    """Return one layer's update for states (rows, n, inputs): float32 (rows, n, outputs)."""
    count = len(states)
    low = states.to(layer.down.dtype).bmm(layer.down.expand(count, -1, -1))
    return low.bmm(layer.up.expand(count, -1, -1)) * layer.scale
