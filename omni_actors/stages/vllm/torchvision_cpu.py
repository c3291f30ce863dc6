"""PyPI's torchvision beside a torch without CUDA: lets it be imported, where it could not.

Its compiled part wants CUDA's libraries. Without that part its import still describes two operators of it ("nms",
"qnms"), and fails, since nothing has declared them. Here they are declared, without an implementation: what is written
in Python works (transformers' image and video processors), a compiled operator says that it is not there.

Only where it is needed: with a torchvision whose compiled part loads, or without any, nothing is done.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

__all__ = ["make_importable"]

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[torch.library.Library] = []
"""Kept: its operators go with it."""


def make_importable() -> bool:
    """Call before anything imports torchvision. Gives whether it was needed."""
    if _declared:
        return True
    found = None if "torchvision" in sys.modules else importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return False
    try:
        for library in Path(found.origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(library))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(operator + _SIGNATURE)
        _declared.append(library)
        return True
    return False
