"""One part of a Hugging Face checkpoint: the weights of one stage, and not the others'."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

Model = TypeVar("Model", bound=PreTrainedModel)


class WrongCheckpoint(ValueError):
    """A checkpoint directory whose configuration and weights do not make the part that a stage needs."""

    def __init__(self, directory: Path, part: str, what: str) -> None:
        self.directory, self.part = directory, part
        super().__init__(f"{directory}: {what}, of the part {part!r}")


def whole_config(directory: Path) -> PreTrainedConfig:
    """The configuration of all parts. Nothing is downloaded. Raises OSError."""
    return AutoConfig.from_pretrained(directory, local_files_only=True)  # type: ignore[no-any-return]


def load_part(model: type[Model], directory: Path, part: str, dtype: torch.dtype, device: str) -> Model:
    """``model`` with the weights whose names begin with ``part.``, in evaluation mode.

    Of the others' weights no more than the names are read. Nothing is downloaded. From now on this process computes
    what can be computed in one way only, in that way, and float32 as such: a replay must come out the same.
    Raises WrongCheckpoint, OSError.
    """
    torch.backends.cudnn.deterministic = True
    if dtype == torch.float32:
        torch.backends.cudnn.allow_tf32 = False  # 10 bits of mantissa
    whole = whole_config(directory)
    config = getattr(whole, f"{part}_config", None)
    if config is None:
        raise WrongCheckpoint(directory, part, f"a {whole.model_type} model has no configuration")
    _convert_as(whole.model_type, config.model_type)
    # Else a page of warnings. By name and module transformers finds how weights are renamed and joined.
    quiet = {"_keys_to_ignore_on_load_unexpected": ["."], "__module__": model.__module__}
    untyped: Any = type(model.__name__, (model,), quiet)
    loaded, info = untyped.from_pretrained(
        directory,
        config=config,
        attn_implementation="sdpa",
        key_mapping={rf"^{part}\.": ""},
        dtype=dtype,
        device_map={"": device},  # straight to it: a thinker's weights need not fit into the host's memory
        local_files_only=True,
        output_loading_info=True,
    )
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise WrongCheckpoint(directory, part, f"no weights for {', '.join(missing[:3])}{more}")
    ready: Model = loaded.eval().requires_grad_(requires_grad=False)
    return ready


def _convert_as(whole: str, part: str) -> None:
    """A part whose type transformers gives no conversions (experts joined into one tensor) is read as the whole is."""
    conversions = get_checkpoint_conversion_mapping(whole)  # type: ignore[no-untyped-call]
    known = get_checkpoint_conversion_mapping(part)  # type: ignore[no-untyped-call]
    if conversions is not None and known is None:
        register_checkpoint_conversion_mapping(part, conversions)
