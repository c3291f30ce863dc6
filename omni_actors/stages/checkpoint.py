"""Loading one part of a Hugging Face checkpoint: the weights that one stage needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from omni_actors.stages.base import StageContext
from omni_actors.stages.bounds import Dtype

Model = TypeVar("Model", bound=PreTrainedModel)


class WrongCheckpoint(ValueError):
    """A checkpoint lacks the configuration or the weights of the part that a stage needs.

    directory: the checkpoint. part: the part's name, such as "thinker". reason: what is missing, in words.
    """

    def __init__(self, directory: Path, part: str, reason: str) -> None:
        self.directory, self.part, self.reason = directory, part, reason
        super().__init__(f"{directory}: part {part!r}: {reason}")


def whole_config(directory: Path) -> PreTrainedConfig:
    """Return the configuration of all parts. Nothing is downloaded.

    Raises OSError: the file is missing or unreadable. ValueError: the model type is unknown.
    """
    return AutoConfig.from_pretrained(directory, local_files_only=True)  # type: ignore[no-any-return]


def load_part(model: type[Model], context: StageContext, part: str, dtype: Dtype) -> Model:
    """Load the weights whose names begin with ``part.`` into a new ``model``, in evaluation mode.

    context: of the stage. Its model is the whole checkpoint; of other parts only the names are read. Nothing is
    downloaded. The weights are loaded to its device, without a copy in the host's memory.
    Side effects: from now on torch computes with the stage's number of threads, and cuDNN uses deterministic algorithms
    in this process, and with float32 no TF32, so that a replay gives the same result.
    Raises ValueError (the stage has no model), WrongCheckpoint, OSError.
    """
    directory = context.model_directory
    torch.set_num_threads(context.threads)
    context.report(f"reading the weights of the {part}")
    torch.backends.cudnn.deterministic = True
    if dtype == "float32":
        torch.backends.cudnn.allow_tf32 = False  # 10 bits of mantissa
    whole = whole_config(directory)
    config = getattr(whole, f"{part}_config", None)
    if config is None:
        raise WrongCheckpoint(directory, part, f"a {whole.model_type} model has no configuration of it")
    _convert_as(whole.model_type, config.model_type)
    # The first entry silences a page of warnings. By class name and module, transformers finds how to rename and join
    # weights.
    quiet = {"_keys_to_ignore_on_load_unexpected": ["."], "__module__": model.__module__}
    untyped: Any = type(model.__name__, (model,), quiet)
    loaded, info = untyped.from_pretrained(
        directory,
        config=config,
        attn_implementation="sdpa",
        key_mapping={rf"^{part}\.": ""},
        dtype=getattr(torch, dtype),
        device_map={"": context.device},  # a thinker's weights may not fit into the host's memory
        local_files_only=True,
        output_loading_info=True,
    )
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise WrongCheckpoint(directory, part, f"there are no weights for {', '.join(missing[:3])}{more}")
    ready: Model = loaded.eval().requires_grad_(requires_grad=False)
    return ready


def _convert_as(whole: str, part: str) -> None:
    """Use the weight conversions of the whole model (such as joining experts) for a part without its own."""
    conversions = get_checkpoint_conversion_mapping(whole)  # type: ignore[no-untyped-call]
    known = get_checkpoint_conversion_mapping(part)  # type: ignore[no-untyped-call]
    if conversions is not None and known is None:
        register_checkpoint_conversion_mapping(part, conversions)
