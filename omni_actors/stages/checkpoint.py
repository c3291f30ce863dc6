"""One part of a Hugging Face checkpoint: the weights of one stage, and no byte of the others'."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

Model = TypeVar("Model", bound=PreTrainedModel)


class IncompleteCheckpoint(ValueError):
    """Weights that a stage needs are not in its checkpoint directory."""

    def __init__(self, directory: Path, part: str, missing: list[str]) -> None:
        self.directory, self.part, self.missing = directory, part, missing
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        super().__init__(f"{directory}: no weights for {shown}, of the part {part!r}")


def load_part(
    model: type[Model], directory: Path, part: str, config: PreTrainedConfig, dtype: torch.dtype, device: str
) -> Model:
    """``model`` with the weights whose names begin with ``part.``; only they are read. In evaluation mode.

    Nothing is downloaded. Raises IncompleteCheckpoint, OSError.
    """
    untyped: Any = model
    untyped._keys_to_ignore_on_load_unexpected = ["."]  # the other parts' weights; a page of warnings otherwise
    loaded, info = untyped.from_pretrained(
        directory,
        config=config,
        key_mapping={rf"^{part}\.": ""},
        dtype=dtype,
        local_files_only=True,
        output_loading_info=True,
    )
    if missing := sorted(info["missing_keys"]):
        raise IncompleteCheckpoint(directory, part, missing)
    ready: Model = loaded.eval().requires_grad_(requires_grad=False).to(torch.device(device))
    return ready
