"""From a model's name to its pipeline: the architecture in the model's ``config.json`` decides, or of a directory of
diffusers the class in its ``model_index.json``.

Rules
1. Nothing is downloaded. A model of a hub must be in huggingface_hub's cache on this machine.
2. A pipeline for devices that this machine lacks uses the devices that it has; without any, the CPU. A stage on the CPU
   computes in the dtype that its engine prefers.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import msgspec

from omni_actors.config.devices import VISIBLE, visible_devices
from omni_actors.config.document import Document
from omni_actors.errors import ConfigError
from omni_actors.stages import assets
from omni_actors.stages.diffusion.pipeline_index import INDEX, read_index

OMNI = {
    "Qwen3OmniMoeForConditionalGeneration": "qwen3_omni",
    "Qwen2_5OmniForConditionalGeneration": "qwen2_5_omni",
    "Qwen2_5OmniModel": "qwen2_5_omni",
    "BagelForConditionalGeneration": "bagel",
}
"""The shipped pipeline of each omni architecture."""
DIFFUSERS = {
    "QwenImagePipeline": "qwen_image",
    "QwenImageImg2ImgPipeline": "qwen_image",
    "QwenImageEditPipeline": "qwen_image_edit",
    "QwenImageEditPlusPipeline": "qwen_image_edit",
}
"""The shipped pipeline of each of these classes of diffusers. The engine ``diffusers`` runs any other class."""
WHISPER, CAUSAL_LM = "WhisperForConditionalGeneration", "ForCausalLM"
KNOWN = (*OMNI, WHISPER, f"any name that ends in {CAUSAL_LM}")
CONTEXT = 2048
"""The default context of the ``llm`` engine, in tokens."""
VIDEO_LIMITS = {"output_bytes": 1 << 29, "unread_bytes": 1 << 30}
"""The limits of a class of diffusers. A video of 81 frames of 832 × 480 has 97 MB, and its frames come all at once."""
MACHINE = "this machine"
"""Origin of a value that follows from the devices of this machine."""


class ModelConfig(msgspec.Struct, frozen=True):
    """The fields of a model's ``config.json`` that decide about its pipeline."""

    architectures: list[str] = []
    enable_audio_output: bool = True
    max_position_embeddings: int | None = None


class Model(msgspec.Struct, frozen=True):
    """A model on this machine. name: as in an error or over HTTP. location: what a stage's ``model`` names it by."""

    name: str
    location: str
    directory: Path
    config: ModelConfig
    is_of_diffusers: bool = False
    """Whether ``architecture`` is the class of diffusers that its ``model_index.json`` names."""

    @property
    def architecture(self) -> str | None:
        return self.config.architectures[0] if self.config.architectures else None

    @property
    def file(self) -> Path:
        """The file that names the architecture."""
        return self.directory / (INDEX if self.is_of_diffusers else "config.json")

    @property
    def is_whisper(self) -> bool:
        """CTranslate2's format names no architecture."""
        return self.architecture == WHISPER or (self.architecture is None and self.is_converted)

    @property
    def is_converted(self) -> bool:
        """Whether the model is in CTranslate2's format."""
        return (self.directory / "model.bin").is_file()


def find(name: str, path: Path) -> Model | None:
    """Return the model that ``name`` means; None if it has the form of no model.

    path: the directory that the name would be.
    Raises assets.ModelNotFound: the model is not on this machine. ConfigError: it has no readable ``config.json``.
    """
    if path.is_dir():
        return _model(path.resolve().name, str(path), path)
    if not assets.names_a_model(name):
        return None
    return _model(name, name, assets.resolve(name))


def shipped_pipeline(model: Model) -> str | None:
    """Return the name of the shipped pipeline for ``model``; None if it needs one stage only (``single_stage``).

    Raises ConfigError: its architecture is not known.
    """
    if model.is_of_diffusers:
        return DIFFUSERS.get(model.architecture or "")
    if model.architecture in OMNI:
        return OMNI[model.architecture]
    if model.is_whisper or (model.architecture or "").endswith(CAUSAL_LM):
        return None
    accepted = f"a model of a known architecture: {', '.join(KNOWN)}"
    raise ConfigError(str(model.directory / "config.json"), "architectures", model.architecture, accepted)


def single_stage(model: Model) -> Document:
    """Return the pipeline of a Whisper, of a causal language model, or of a class of diffusers. Raises ConfigError."""
    stage: dict[str, Any]
    limits: dict[str, int] = {}
    if model.is_of_diffusers:
        limits = VIDEO_LIMITS
        stage = {"engine": "diffusers", "accepts": ["messages", "image"], "emits": "image", "device": "cuda:0"}
        stage["options"] = {"dtype": "bfloat16"}
    elif model.is_whisper:
        if not model.is_converted:
            raise _not_converted(model)
        stage = {"engine": "whisper", "accepts": ["audio"], "emits": "transcript"}
    else:
        options: dict[str, Any] = {"dtype": "bfloat16"}
        if (positions := model.config.max_position_embeddings) is not None and positions < CONTEXT:
            options["context"] = positions
        stage = {"engine": "llm", "accepts": ["messages"], "emits": "text", "device": "cuda:0", "options": options}
    stages = {stage["engine"]: {**stage, "model": model.location}}
    return Document.made({"name": model.name, "stages": stages, "limits": limits}, str(model.file))


def adapt(document: Document, model: Model) -> Document:
    """Change a pipeline for this model and the devices of this machine, and return it."""
    document.file = str(model.file)
    document.assign("name", model.name, document.file)
    document.set_all("model", model.location, document.file)
    if not model.config.enable_audio_output:
        for name in [name for name, stage in document.values["stages"].items() if stage.get("emits") != "text"]:
            document.remove(f"stages.{name}")
    _use_present_devices(document, cuda_devices())
    return document


def cuda_devices() -> int:
    """Return the number of CUDA devices that processes of this machine see, without loading a library."""
    return min(_present(), len(visible_here() or ()))


def visible_here() -> tuple[str, ...] | None:
    """Return the names of the CUDA devices that this process sees; None: unknown."""
    return visible_devices(os.environ.get(VISIBLE), _present())


def _present() -> int:
    """Return the number of CUDA devices of this machine; 0: none, or unknown for lack of descriptors."""
    try:
        return sum(1 for _ in Path("/dev").glob("nvidia[0-9]*"))
    except OSError:
        return 0


def _model(name: str, location: str, directory: Path) -> Model:
    file = directory / INDEX
    try:
        if not file.is_file():
            return Model(name, location, directory, _config(directory))
        config = ModelConfig(architectures=[read_index(directory).class_name])
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(file), "(document)", file.name, f"the index of a pipeline ({error})") from error
    return Model(name, location, directory, config, is_of_diffusers=True)


def _config(directory: Path) -> ModelConfig:
    file = directory / "config.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=ModelConfig)
    except OSError as error:
        accepted = "a directory with the config.json or model_index.json of a model, or the path of a YAML file"
        raise ConfigError(str(directory), "(model)", str(directory), accepted) from error
    except (ValueError, RecursionError) as error:  # no JSON, another form, no UTF-8, or nested too deeply
        raise ConfigError(str(file), "(document)", file.name, f"the configuration of a model ({error})") from error


def _not_converted(model: Model) -> ConfigError:
    target = f"{model.directory}-ct2"
    command = (
        f"ct2-transformers-converter --model {model.directory} --output_dir {target}"
        " --copy_files tokenizer.json preprocessor_config.json"
    )
    accepted = f"a Whisper model in CTranslate2's format; run: {command}; then open {target}"
    return ConfigError(str(model.directory), "(model)", model.name, accepted)


def _use_present_devices(document: Document, present: int) -> None:
    for name, stage in document.values["stages"].items():
        found = re.fullmatch(r"cuda:(\d+)", stage.get("device", "cpu"))
        if found is None or int(found[1]) < present:
            continue
        device = f"cuda:{int(found[1]) % present}" if present else "cpu"
        document.assign(f"stages.{name}.device", device, MACHINE)
        if device == "cpu":
            document.remove(f"stages.{name}.options.dtype")
