"""The weights of a LoRA adapter, checked against the linear layers of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from omni_actors.errors import InvalidAdapter
from omni_actors.stages.adapters.files import CONFIG, WEIGHTS, AdapterFiles

PARTS = ("thinker", "talker")
"""The parts of omni models that serve adapters. The weights of an adapter of a whole model begin with their names."""
_RENAMED = {
    "model.layers.": "model.language_model.layers.",
    "audio_tower.": "model.audio_tower.",
    "visual.": "model.visual.",
}
"""The beginnings of names in a thinker before transformers 5, and since."""
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


class LoraLayer(NamedTuple):
    """One layer's update: ``states @ down @ up * scale``. Float32, as PEFT keeps adapters of half-precision models."""

    down: Tensor
    """(inputs, rank)"""
    up: Tensor
    """(rank, outputs)"""
    scale: float


def load(
    files: AdapterFiles,
    shapes: Mapping[str, tuple[int, int]],
    part: str,
    device: torch.device,
    *,
    elsewhere: Collection[str] = (),
) -> dict[str, LoraLayer]:
    """Return the layers of an adapter, by the path of the module that each updates.

    shapes: the outputs and inputs of each linear layer of the model. part: the part of an omni model that the model is;
    "" for a model without parts. Weights of other parts are left out, and those of layers ``elsewhere``.
    Raises InvalidAdapter.
    """
    tensors = _tensors(files)
    layers = {}
    for module, path in _own(files, tensors, shapes, part):
        if path in elsewhere:
            continue
        if path not in shapes:
            raise InvalidAdapter(files.directory, f"{WEIGHTS}: the model has no linear layer {path!r}", misfit=True)
        layers[path] = _layer(files, module, tensors, shapes[path], device)
    if not layers:
        found = f"there are no weights of the {part}" if part else "there are no weights"
        raise InvalidAdapter(files.directory, f"{WEIGHTS}: {found}", misfit=True)
    return layers


def check(files: AdapterFiles, shapes: Mapping[str, tuple[int, int]], part: str) -> None:
    """Check the weights of an adapter that something else applies, which may know other modules. Arguments as ``load``.

    Raises InvalidAdapter: there are none, some are no finite floats of two dimensions, or an update does not fit.
    """
    tensors = _tensors(files)
    if not tensors:
        raise InvalidAdapter(files.directory, f"{WEIGHTS}: there are no weights")
    for name, weight in tensors.items():
        if weight.ndim != 2 or not weight.is_floating_point():
            found = f"{weight.dtype} {tuple(weight.shape)}"
            raise InvalidAdapter(files.directory, f"{WEIGHTS}: {name}: found {found}; accepted: floats (n, m)")
        if not weight.to(torch.float32).isfinite().all():
            raise InvalidAdapter(files.directory, f"{WEIGHTS}: {name}: some of its numbers are not finite")
    updates = {name for name in tensors if name.endswith((_DOWN, _UP))}
    for module, path in _own(files, updates, shapes, part):
        if path in shapes:
            layer = _layer(files, module, tensors, shapes[path], torch.device("cpu"))
            if not (layer.up * layer.scale).isfinite().all():
                raise InvalidAdapter(files.directory, f"{CONFIG}: the scale of {module!r} is too large")


def _own(
    files: AdapterFiles, names: Iterable[str], shapes: Mapping[str, tuple[int, int]], part: str
) -> Iterator[tuple[str, str]]:
    """Yield the modules that an adapter updates, but those of other parts, and the path of each in the model."""
    for module in sorted({_module(files, name) for name in names}):
        first, _, rest = module.partition(".")
        if not part or first not in PARTS or first == part:
            yield module, _present(rest if part and first == part else module, shapes)


def _present(path: str, shapes: Mapping[str, tuple[int, int]]) -> str:
    """Return the path of a module as the model has it, if that is known."""
    renamed = [new + path.removeprefix(old) for old, new in _RENAMED.items() if path.startswith(old)]
    return next((each for each in renamed if path not in shapes and each in shapes), path)


def _tensors(files: AdapterFiles) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(files.weights)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:  # KeyError: torch has no such dtype
        raise InvalidAdapter(files.directory, f"{WEIGHTS}: {error}") from error


def _module(files: AdapterFiles, name: str) -> str:
    module = name.removeprefix(_PREFIX)
    for suffix in (_DOWN, _UP):
        if module.endswith(suffix):
            return module.removesuffix(suffix)
    raise InvalidAdapter(files.directory, f"{WEIGHTS}: {name!r} is no update of a linear layer (lora_A, lora_B)")


def _layer(
    files: AdapterFiles, module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int], device: torch.device
) -> LoraLayer:
    rank, (outputs, inputs) = files.config.rank(module), shape
    pair = []
    for suffix, expected in ((_DOWN, (rank, inputs)), (_UP, (outputs, rank))):
        name = f"{module}{suffix}"
        weight = tensors.get(_PREFIX + name, tensors.get(name))
        if weight is None:
            raise InvalidAdapter(files.directory, f"{WEIGHTS}: {name!r} is missing")
        if weight.shape != expected or not weight.is_floating_point():
            found = f"{weight.dtype} {tuple(weight.shape)}"
            raise InvalidAdapter(files.directory, f"{WEIGHTS}: {name}: found {found}; accepted: floats {expected}")
        weight = weight.to(device, torch.float32)
        if not weight.isfinite().all():
            raise InvalidAdapter(files.directory, f"{WEIGHTS}: {name}: some numbers are not finite")
        pair.append(weight.T.contiguous())
    return LoraLayer(pair[0], pair[1], files.config.scale(module))
