"""One part of a Hugging Face checkpoint: the weights of one stage, and not the others'."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

Model = TypeVar("Model", bound=PreTrainedModel)


class WrongCheckpoint(ValueError):
    """A checkpoint directory whose configuration and weights do not make the part that a stage needs."""

    def __init__(self, directory: Path, part: str, what: str) -> None:
        self.directory, self.part = directory, part
        super().__init__(f"{directory}: {what}, of the part {part!r}")


def part_config(directory: Path, part: str) -> PreTrainedConfig:
    """The configuration of ``part``. Nothing is downloaded. Raises WrongCheckpoint, OSError."""
    whole = AutoConfig.from_pretrained(directory, local_files_only=True)
    config = getattr(whole, f"{part}_config", None)
    if config is None:
        raise WrongCheckpoint(directory, part, f"a {whole.model_type} model has no configuration")
    return config  # type: ignore[no-any-return]


def load_part(
    model: type[Model], directory: Path, part: str, config: PreTrainedConfig, dtype: torch.dtype, device: str
) -> Model:
    """``model`` with the weights whose names begin with ``part.``, in evaluation mode.

    Of the others' weights no more than the names are read. Raises WrongCheckpoint, OSError.
    """
    untyped: Any = type(model.__name__, (model,), {"_keys_to_ignore_on_load_unexpected": ["."]})  # no page of warnings
    loaded, info = untyped.from_pretrained(
        directory,
        config=config,
        attn_implementation="sdpa",
        key_mapping={rf"^{part}\.": ""},
        dtype=dtype,
        local_files_only=True,
        output_loading_info=True,
    )
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise WrongCheckpoint(directory, part, f"no weights for {', '.join(missing[:3])}{more}")
    ready: Model = loaded.eval().requires_grad_(requires_grad=False).to(torch.device(device))
    return ready
