"""From a name to a document: a shipped pipeline, a YAML file, or a model.

A file may extend another source: ``extends: NAME``. The file then changes the document of that source by the rules of
``document``. A path in ``extends`` is relative to the file.
"""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

import msgspec

from omni_actors.config import models
from omni_actors.config.document import Document, one_of
from omni_actors.errors import ConfigError
from omni_actors.stages import assets

DEEPEST = 8
"""Most files that extend one another."""


class _Reference(msgspec.Struct, frozen=True):
    """A name, and where it was found. folder: what a path is relative to. place: FILE:LINE, if a file extends it.

    below: the files that extend it, the first one first.
    """

    name: str
    folder: Path = Path()
    place: str | None = None
    below: tuple[Path, ...] = ()

    @property
    def path(self) -> Path:
        return self.folder / Path(self.name).expanduser()

    def error(self, kind: str, accepted: str) -> ConfigError:
        """Return the error for this name. kind: what it was taken for."""
        if self.place is None:
            return ConfigError(self.name, f"({kind})", self.name, accepted)
        return ConfigError(self.place, "extends", self.name, accepted)


def config_names() -> list[str]:
    """Return the names of the pipelines that ship with omni_actors."""
    return sorted(path.stem for path in _config_dir().glob("*.yaml"))


def read(name: str) -> Document:
    """Return the document of a shipped pipeline, of a YAML file, or of a model. Raises ConfigError."""
    return _read(_Reference(name))


def _read(reference: _Reference) -> Document:
    name = reference.name
    if name in config_names():  # first: the current directory may be one that cannot be searched
        return _read_file(_config_dir() / f"{name}.yaml", reference)
    try:
        path, is_file = reference.path, reference.path.is_file()
    except (OSError, RuntimeError) as error:  # a name that is too long, or the home of an unknown user
        raise reference.error("name", f"a name, or the path of a file ({error})") from error
    if path.suffix in {".yaml", ".yml"}:
        if not is_file:
            raise reference.error("file", "the path of a YAML file that exists")
        return _read_file(path, reference)
    if os.sep in name and is_file:
        return _read_file(path, reference)
    if (model := _find_model(reference)) is not None:
        shipped_name = models.shipped_pipeline(model)
        if shipped_name is None:
            return models.adapt(models.single_stage(model), model)
        return models.adapt(_read(_Reference(shipped_name)), model)
    if os.sep in name:
        raise reference.error("file", "the path of a YAML file, or of a model's directory, that exists")
    accepted = f"the path of a YAML file, a model's directory or name, or {one_of(name, config_names())}"
    raise reference.error("name", accepted)


def _read_file(path: Path, reference: _Reference) -> Document:
    here = path.resolve()
    if here in reference.below:
        chain = " -> ".join(each.name for each in (*reference.below, here))
        raise reference.error("file", f"a file that does not extend itself: {chain}")
    if len(reference.below) == DEEPEST:
        raise reference.error("file", f"at most {DEEPEST} files that extend one another")
    document = Document.parsed(path)
    if "extends" not in document.values:
        return document
    name, place = document.values.pop("extends"), document.origins.pop("extends")
    if not isinstance(name, str):
        raise ConfigError(place, "extends", name, "the name of a pipeline or a model, or the path of a file")
    base = _read(_Reference(name, here.parent, place, (*reference.below, here)))
    return base.extended_by(document)


def _find_model(reference: _Reference) -> models.Model | None:
    try:
        return models.find(reference.name, reference.path)
    except assets.ModelNotFound as error:
        hub = error.package is None and assets.is_hub_name(reference.name)
        remedy = f"hf download {reference.name}" if hub else error.remedy
        accepted = f"a model on this machine ({error.reason}; run: {remedy}), or the path of a YAML file"
        raise reference.error("model", accepted) from error


def _config_dir() -> Path:
    package = Path(str(resources.files("omni_actors")))
    packaged = package / "configs"
    return packaged if packaged.is_dir() else package.parent / "configs"
