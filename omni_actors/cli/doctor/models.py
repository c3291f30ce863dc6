"""The checks of models and pipelines: where models are kept, and what pipelines miss."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich import filesize

from omni_actors import config as configuration
from omni_actors.cli.doctor.findings import Finding, error, ok, warning
from omni_actors.errors import ConfigError
from omni_actors.stages import assets
from omni_actors.system import machine

LITTLE_DISK = 2 * 2**30
"""Bytes below which the models of ``voice`` do not fit comfortably."""
DEFAULT_PIPELINE = "voice"
CORRECT = "correct the name or the file"
"""The remedy where no command helps, as for a directory that does not exist."""


def check(names: Sequence[str]) -> Iterator[Finding]:
    """Yield the state of the model caches and of pipelines.

    names: the pipelines that must work. If there are none, ``DEFAULT_PIPELINE`` is looked at, and may lack something.
    """
    yield _cache("converted models", assets.cache_dir, "OMNI_ACTORS_CACHE")
    yield _cache("models of a hub", _hub, "HF_HOME")
    for name in names or [DEFAULT_PIPELINE]:
        yield _pipeline(name, is_asked=bool(names))


def _hub() -> Path:
    """Return the directory of a hub's models. Raises RuntimeError: the user has no home directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or Path(cache) / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _cache(name: str, find: Callable[[], Path], variable: str) -> Finding:
    """Look at a directory of models. find: returns it, or raises RuntimeError: the user has no home directory."""
    try:
        place = find()
    except RuntimeError as failure:
        return warning("models", name, f"not known: {failure}", f"name a directory in {variable}")
    try:
        is_there = place.exists()
        there = next(each for each in (place, *place.parents) if each.exists())
        free = shutil.disk_usage(there).free
    except OSError as failure:
        remedy = f"make {place} readable, or name another directory in {variable}"
        return warning("models", name, f"{place}: {failure.strerror}", remedy)
    found = f"{place}: {filesize.decimal(free)} free" + ("" if is_there else ", not made yet")
    if not there.is_dir() or not os.access(there, os.W_OK):
        remedy = f"make {there} a directory that can be written, or name another one in {variable}"
        return warning("models", name, f"{place}: not writable", remedy)
    if free < LITTLE_DISK:
        return warning("models", name, found, f"free some space, or name another directory in {variable}")
    return ok("models", name, found)


def _pipeline(name: str, *, is_asked: bool) -> Finding:
    label = f"pipeline {name}"
    try:
        pipeline = configuration.load(name)
    except ConfigError as failure:
        return error("models", label, str(failure), CORRECT)
    problems = [(each.path, *each.accepted.partition("; run:")) for each in machine.problems(pipeline)]
    if not problems:
        return ok("models", label, "its libraries and its models are here")
    is_prepared = any(run for _, _, run, _ in problems)
    remedy = machine.remedy(pipeline) or (f"omni-actors prepare {name}" if is_prepared else CORRECT)
    lacks = "; ".join(f"{path}: {accepted}" for path, accepted, _, _ in problems)
    return (error if is_asked else warning)("models", label, lacks, remedy)
