"""Loading one part of a Hugging Face checkpoint: the weights that one stage needs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from omni_actors.stages import weights
from omni_actors.stages.base import InvalidRequest, StageContext
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
        dtype=getattr(torch, dtype),
        device_map={"": context.device},  # a thinker's weights may not fit into the host's memory
        **_how_to_load(part),
    )
    if missing := sorted(info["missing_keys"]):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise WrongCheckpoint(directory, part, f"there are no weights for {', '.join(missing[:3])}{more}")
    ready: Model = loaded.eval().requires_grad_(requires_grad=False)
    return ready


def _how_to_load(part: str) -> dict[str, Any]:
    return {
        "attn_implementation": "sdpa",
        "key_mapping": {rf"^{part}\.": ""},
        "local_files_only": True,
        "output_loading_info": True,
    }


class PartWeights:
    """The weights of a part that ``load_part`` has loaded, which can be replaced in place.

    Make it before anything else changes the model's modules or its configuration. context: of the stage.
    """

    def __init__(self, model: PreTrainedModel, context: StageContext, part: str) -> None:
        self._part, self._directory = part, context.model_directory
        self._class: Any = type(model)
        self._config, self._dtype = copy.deepcopy(model.config), model.dtype
        self._targets: dict[str, torch.Tensor] = model.state_dict()
        """The model's own tensors, by the names that they have in ``_class``."""

    def replace(self, files: weights.Files) -> dict[str, Any]:
        """Replace the weights of the part that the files have; tensors of other parts are passed over.

        Names and shapes are those of the checkpoint. What transformers joins to one tensor, such as the experts of a
        layer, comes together. The new weights are in the host's memory meanwhile.

        Returns ``updated``, the number of the files' tensors that were used, and ``complete``: whether no weight is
        left as it was. Raises InvalidRequest: a file or a tensor is wrong; nothing has changed.
        """
        prefix = f"{self._part}."
        names = whole_config(self._directory).sub_configs
        weights.refuse_unless_among_parts(files, [name.removesuffix("_config") for name in names])
        own = weights.shapes(weights.checkpoint_files(self._directory), prefix)
        tensors = weights.read(files, prefix)
        weights.check({name: tuple(tensor.shape) for name, tensor in tensors.items()}, own)
        weights.check_floating(tensors)
        try:
            loaded, info = self._class.from_pretrained(
                None,
                config=copy.deepcopy(self._config),
                dtype=self._dtype,
                state_dict=dict(tensors),
                **_how_to_load(self._part),
            )
        except RuntimeError as error:  # a part of what is joined is missing
            raise InvalidRequest(f"the weights do not fit: {error}", param="path") from error
        missing = set(info["missing_keys"])
        with torch.no_grad():
            for name, tensor in loaded.state_dict().items():
                if name not in missing:
                    self._targets[name].copy_(tensor)
        return {"updated": len(tensors), "complete": not missing}


def _convert_as(whole: str, part: str) -> None:
    """Use the weight conversions of the whole model (such as joining experts) for a part without its own."""
    conversions = get_checkpoint_conversion_mapping(whole)  # type: ignore[no-untyped-call]
    known = get_checkpoint_conversion_mapping(part)  # type: ignore[no-untyped-call]
    if conversions is not None and known is None:
        register_checkpoint_conversion_mapping(part, conversions)
