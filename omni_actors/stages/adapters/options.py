"""How a request names its LoRA adapter."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from omni_actors.stages.bounds import Name


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One version of a LoRA adapter. A request carries it to every worker, so it needs nothing that a worker keeps."""

    name: Name
    """The name by which clients choose the adapter. A later version may have the same name."""
    directory: Annotated[str, Meta(max_length=4096)]
    """The absolute path of a directory as PEFT saves it."""
    digest: Annotated[str, Meta(max_length=64)]
    """A hash of its files (``adapters.files``). A worker refuses files that have changed since they were added."""


Lora = Name | Adapter
"""A request parameter: the caller gives a name, and the parent puts the adapter of that name in its place."""

LOAD, KEEP = "load_lora", "keep_loras"
"""The capabilities of an engine that serves adapters. ``LOAD`` takes an ``adapter`` and raises InvalidRequest if it
does not fit the model. ``KEEP`` takes the fields of ``KeptAdapters``: it is a part of a stage's desired state."""


class KeptAdapters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The adapters that requests may name from now on. Requests that began with another one keep it until they end."""

    adapters: tuple[Adapter, ...] = ()
    pinned: tuple[Name, ...] = ()
    """The names of those that stay in memory, whether requests use them or not."""
