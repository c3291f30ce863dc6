"""New weights for a model that serves, read from safetensors files.

Rules
1. Everything is read and checked before anything changes: refused files leave the model as it is.
2. The tensors have the names, shapes and order of axes of the model's own checkpoint. Files may have some of the
   tensors only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from omni_actors.stages import weights
from omni_actors.stages.autoregressive.packed import PackedLinear


def replace_weights(model: Any, files: weights.Files) -> dict[str, Any]:
    """Replace weights of a transformers model in place.

    Returns ``updated``, the number of tensors that were replaced, and ``complete``: whether these are all.
    Raises InvalidRequest: a file is missing, has changed or is damaged, or a tensor does not fit; nothing has changed.
    """
    tensors = weights.read(files)
    targets = _targets(model)
    if tied := _tied(model):
        output, source = tied
        if source in tensors:
            tensors.setdefault(output, tensors[source])
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    weights.check(found, {name: _shape(target) for name, target in targets.items()})
    weights.check_floating(tensors)
    with torch.no_grad():
        for name, tensor in tensors.items():
            target = targets[name]
            if isinstance(target, PackedLinear):
                target.pack(tensor.to(target.dtype))
            else:
                target.copy_(tensor)
    return {"updated": len(tensors), "complete": tensors.keys() >= targets.keys()}


def _targets(model: Any) -> dict[str, Tensor | PackedLinear]:
    """Return what holds each of the model's weights, by name. A tied weight has one name."""
    targets: dict[str, Tensor | PackedLinear] = dict(model.named_parameters())
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            targets[f"{name}.weight"] = module
    return targets


def _tied(model: nn.Module) -> tuple[str, str] | None:
    """Return the name of a packed output layer's weight and of the embedding that it is a copy of, if it is one."""
    untyped: Any = model
    if not untyped.config.get_text_config().tie_word_embeddings:
        return None
    names = {id(module): name for name, module in model.named_modules()}
    output, source = untyped.get_output_embeddings(), untyped.get_input_embeddings()
    if not isinstance(output, PackedLinear):
        return None  # it is one tensor
    return f"{names[id(output)]}.weight", f"{names[id(source)]}.weight"


def _shape(target: Tensor | PackedLinear) -> tuple[int, ...]:
    if isinstance(target, PackedLinear):
        return target.out_features, target.in_features
    return tuple(target.shape)
