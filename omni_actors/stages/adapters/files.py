"""Reads the files of a LoRA adapter, as PEFT's ``save_pretrained`` writes them, and checks its configuration.

Rules
1. Nothing that changes an adapter's result is ignored: a field of ``adapter_config.json`` that is neither read nor
   known to have no effect on inference must be empty.
2. An adapter's files are read once, as bytes. The digest and the weights come from the same bytes.
3. No model library is imported, because the parent reads the files too.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from omni_actors.errors import InvalidAdapter
from omni_actors.stages.adapters.options import Adapter

N = TypeVar("N", int, float)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NEUTRAL = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
        *("exclude_modules", "layers_pattern", "layers_to_transform", "lora_dropout", "target_modules"),
        *("corda_config", "eva_config", "loftq_config", "lora_ga_config"),  # of an initialization
        *("megatron_core", "qalora_group_size", "runtime_config"),  # of features that other fields turn on
    }
)
"""Fields without an effect on inference. The names of the weights say which modules an adapter changes."""
_HARMLESS_INITIALIZATIONS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Others, such as PiSSA, change the weights of the base model, which this adapter's files do not have."""


class AdapterConfig(msgspec.Struct, frozen=True):
    """The fields of ``adapter_config.json`` that determine what an adapter computes."""

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}

    def rank(self, module: str) -> int:
        """Return the rank of a module's update. module: its path in the model that PEFT wrapped."""
        return _by_pattern(self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """Return the factor of a module's update."""
        rank = self.rank(module)
        return _by_pattern(self.alpha_pattern, module, self.lora_alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def _by_pattern(patterns: Mapping[str, N], module: str, default: N) -> N:
    """Return the value of the first pattern that matches, as PEFT's ``get_pattern_key`` finds it."""
    return next((value for key, value in patterns.items() if _pattern(key).match(module)), default)


def _pattern(key: str) -> re.Pattern[str]:
    """Compile a key of ``rank_pattern``. Raises re.error, OverflowError or RecursionError for one that is none."""
    return re.compile(rf"(.*\.)?({key})$")


class AdapterFiles(msgspec.Struct, frozen=True):
    """The content of an adapter's directory."""

    directory: str
    config: AdapterConfig
    weights: bytes
    """The whole safetensors file."""
    digest: str


def read(directory: str) -> AdapterFiles:
    """Read an adapter's directory. It blocks while it reads. Raises InvalidAdapter."""
    try:
        config, weights = (_content(Path(directory) / name) for name in (CONFIG, WEIGHTS))
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason = getattr(error, "strerror", None) or str(error)
        missing = Path(getattr(error, "filename", None) or directory).name
        raise InvalidAdapter(directory, f"{missing}: {reason}; {CONFIG} and {WEIGHTS} were expected") from error
    digest = hashlib.blake2b(len(config).to_bytes(8, "little"), digest_size=16)
    digest.update(config)
    digest.update(weights)
    return AdapterFiles(directory, _checked(directory, config), weights, digest.hexdigest())


def _content(path: Path) -> bytes:
    """Read a file. A pipe would be waited for, and a device may have no end. Raises OSError, ValueError."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


def times(adapter: Adapter) -> tuple[tuple[int, int, int], ...] | None:
    """Return what changes with an adapter's files: their numbers, sizes and times. None: one is missing."""
    try:
        found = [(Path(adapter.directory) / name).stat() for name in (CONFIG, WEIGHTS)]
    except OSError:
        return None
    return tuple((each.st_ino, each.st_size, each.st_ctime_ns) for each in found)


def read_again(adapter: Adapter) -> AdapterFiles:
    """Read the files of an adapter that was added before. Raises InvalidAdapter, also if they have changed since."""
    files = read(adapter.directory)
    if files.digest != adapter.digest:
        raise InvalidAdapter(adapter.directory, f"the files of {adapter.name!r} have changed since it was added")
    return files


def named(lora: str | Adapter | None) -> Adapter | None:
    """Return a request's adapter. Raises InvalidAdapter for a name that the parent has not replaced."""
    if isinstance(lora, str):
        raise InvalidAdapter(lora, "the system has no adapter of this name")
    return lora


def _checked(directory: str, encoded: bytes) -> AdapterConfig:
    try:
        fields = msgspec.json.decode(encoded, type=dict[str, Any])
        config = msgspec.convert({name: value for name, value in fields.items() if value is not None}, AdapterConfig)
        for key in (*config.rank_pattern, *config.alpha_pattern):
            _pattern(key)
    except (msgspec.MsgspecError, UnicodeError, re.error, OverflowError, RecursionError) as error:
        raise InvalidAdapter(directory, f"{CONFIG}: {error}") from error
    ranks = (config.r, *config.rank_pattern.values())
    if min(ranks) < 1:
        raise InvalidAdapter(directory, f"{CONFIG}: found rank {min(ranks)}; accepted: 1 or more")
    factors = (config.lora_alpha, *config.alpha_pattern.values())
    if not all(map(math.isfinite, factors)):
        raise InvalidAdapter(directory, f"{CONFIG}: lora_alpha is not finite")
    for name, value in fields.items():
        if (accepted := _accepted(name, value)) is not None:
            raise InvalidAdapter(directory, f"{CONFIG}: found {name}: {value!r}; accepted: {accepted}")
    return config


def _accepted(name: str, value: Any) -> str | None:
    """Return what is accepted of a field, in words; None: this value is."""
    if name in AdapterConfig.__struct_fields__ or name in _NEUTRAL:
        return None
    if name == "peft_type":
        return None if value == "LORA" else "'LORA'"
    if name == "bias":
        return None if value == "none" else "'none'"
    if name == "init_lora_weights":
        return None if value in _HARMLESS_INITIALIZATIONS else "an initialization that leaves the base model unchanged"
    return "no value: this engine does not compute it" if value else None
