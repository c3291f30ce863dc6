"""PyPI's torchvision beside a torch without CUDA: lets it be imported, where it could not.

Its compiled part wants CUDA's libraries. Without that part its import still describes two operators of it ("nms",
"qnms"), and fails, since nothing has declared them; what imports it fails too, transformers' models among others. Here
they are declared, without an implementation: what torchvision does in Python works (all that vLLM and transformers
prepare pictures with), a compiled operator says that it is not there.

`python -m omni_actors.stages.vllm.torchvision_cpu` puts a copy of this file into the environment's site-packages, which
every interpreter reads as it starts (a .pth file says so). It acts at the import of torchvision, and only where it is
needed: with a compiled part that loads, nothing changes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
NAME = "omni_actors_torchvision_cpu"
_kept: list[Any] = []
"""Declarations go when the object that made them does."""


class BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing; is asked first, once."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            found = importlib.machinery.PathFinder.find_spec(name)
            if found is not None and found.origin is not None:
                _kept.append(declare(Path(found.origin).parent))


def declare(directory: Path) -> Any:
    """directory: torchvision's. Gives what holds the declarations; None where they are not needed."""
    import torch

    try:
        for compiled in directory.glob("_C*.so"):
            torch.ops.load_library(str(compiled))  # type: ignore[no-untyped-call]
    except OSError:
        library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for operator in ("nms", "qnms"):
            library.define(operator + SIGNATURE)  # type: ignore[no-untyped-call]
        return library
    return None


def install() -> None:
    """Into the site-packages of this interpreter."""
    import sysconfig

    folder = Path(sysconfig.get_path("purelib"))
    (folder / f"{NAME}.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    (folder / f"{NAME}.pth").write_text(f"import {NAME}\n", encoding="utf-8")


if __name__ == "__main__":
    install()
elif __name__ == NAME:
    sys.meta_path.insert(0, BeforeTorchvision())
