"""Loading a pipeline's directory.

Rules
1. Nothing is downloaded, and no code of the directory runs: the pipeline's class is one of diffusers, and its
   components are of diffusers and transformers.
2. Weights are read from safetensors files only, because other formats can run code. Every file's header is checked
   first, so that an error names the file.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import diffusers
import msgspec
import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from omni_actors.stages import assets
from omni_actors.stages.base import StageContext
from omni_actors.stages.diffusers.options import DiffusersOptions
from omni_actors.stages.diffusion.pipeline_index import INDEX

DENOISERS = ("transformer", "unet")
"""The names of a network that denoises in a pipeline."""
LIBRARIES = ("diffusers", "transformers")
CUT = "sequence-length-is-longer-than-the-specified-maximum"
"""The warning of a tokenizer about a long text, as it notes that the warning was given."""


class WrongPipeline(ValueError):
    """A directory has no pipeline that the engine can run. directory: of the pipeline. reason: in words."""

    def __init__(self, directory: Path, reason: str) -> None:
        self.directory, self.reason = directory, reason
        super().__init__(f"{directory}: {reason}")


def load(context: StageContext, options: DiffusersOptions) -> Any:
    """Return the pipeline in ``context.model``, on the stage's device, without a progress bar.

    Side effects: from now on torch computes with the stage's number of threads, and cuDNN uses deterministic algorithms
    in this process, and with float32 no TF32, so that a replay gives the same picture.
    Raises WrongPipeline: rule 1 or 2. ValueError, OSError and other exceptions of diffusers: the weights do not fit.
    """
    directory = context.model_directory
    torch.set_num_threads(context.threads)
    torch.backends.cudnn.deterministic = True
    if options.dtype == "float32":
        torch.backends.cudnn.allow_tf32 = False  # 10 bits of mantissa
    # Importing torch's compiler creates this directory. Without the variable it would be one in /tmp that stays.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(assets.cache_dir() / "torchinductor"))
    check(directory)
    context.report("reading the weights of the pipeline")
    diffusers.utils.logging.disable_progress_bar()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it would fill the end of stderr
    untyped: Any = diffusers.DiffusionPipeline
    pipeline = untyped.from_pretrained(
        directory,
        dtype=getattr(torch, options.dtype),
        variant=options.variant,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
    )
    for name, part in pipeline.components.items():
        if isinstance(part, PreTrainedTokenizerBase):
            part.deprecation_warnings[CUT] = True  # pipelines cut long prompts, as documented
        weights = part.named_parameters() if isinstance(part, torch.nn.Module) else ()
        if missing := [key for key, weight in weights if weight.is_meta]:
            raise WrongPipeline(directory, f"{name}: there are no weights for {', '.join(missing[:3])}")
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(context.device)


def image_pipeline(pipeline: Any) -> Any | None:
    """Return the pipeline with the same modules that begins with a picture; None if diffusers has none."""
    try:
        twin = diffusers.AutoPipelineForImage2Image.from_pipe(pipeline)
    except ValueError:
        return None
    twin.set_progress_bar_config(disable=True)
    return twin


def denoiser(pipeline: Any) -> torch.nn.Module:
    """Return the network that denoises: the one that LoRA adapters update. Without one, a network without layers."""
    found = (getattr(pipeline, name, None) for name in DENOISERS)
    return next((each for each in found if isinstance(each, torch.nn.Module)), torch.nn.Module())


def check(directory: Path) -> None:
    """Raise WrongPipeline if ``directory`` breaks a rule of this module. No weights are read."""
    try:
        index = msgspec.json.decode((directory / INDEX).read_bytes(), type=dict[str, Any])
    except FileNotFoundError as error:
        raise WrongPipeline(directory, f"there is no {INDEX}, so this is no pipeline of diffusers") from error
    except msgspec.DecodeError as error:
        raise WrongPipeline(directory, f"{INDEX}: {error}") from error
    name = index.get("_class_name")
    if not isinstance(name, str):
        raise WrongPipeline(directory, f"{INDEX}: _class_name is {name!r}; code in the directory is not run")
    known = getattr(diffusers, name, None)
    if not (isinstance(known, type) and issubclass(known, diffusers.DiffusionPipeline)):
        raise WrongPipeline(directory, f"diffusers {diffusers.__version__} has no pipeline {name!r} that can run here")
    if lacking := _lacking(known):
        raise WrongPipeline(directory, f"{name} {lacking}")
    for part, value in index.items():
        if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)):
            continue  # an absent component, or a setting
        library = value[0]
        if library not in LIBRARIES and not hasattr(diffusers.pipelines, library):
            raise WrongPipeline(directory, f"{part} needs code from {library!r}, which is not run")
        _check_weights(directory, part)


def _lacking(pipeline: type[Any]) -> str | None:
    """Return why the engine cannot run a class of pipelines, or None if it can."""
    taken = inspect.signature(pipeline.__call__).parameters.keys()
    if "prompt" not in taken or not taken & {"height", "image"}:
        return "makes no pictures from a prompt"
    if not taken & {"callback_on_step_end", "callback"}:
        return "does not call back after each step, so its requests could be neither aborted nor alternated"
    return None


def _check_weights(directory: Path, part: str) -> None:
    for file in sorted((directory / part).glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise WrongPipeline(directory, f"{part}/{file.name} is damaged: {error}") from error
