"""What the parent and the helper that uses Ray tell each other: JSON documents, one a line."""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from omni_actors.cluster.agent import AgentSettings

AUTO: Final = "auto"
"""In place of Ray's address: the Ray that this machine is a node of."""
LOCAL: Final = "local"
"""In place of Ray's address: start a Ray on this machine."""


class RayNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node of Ray. free_cpus, free_gpus: those that Ray has given to no job. labels: as "name=value", or "name".

    is_parents: whether the parent runs there.
    """

    node_id: str
    name: str
    address: str
    cpus: float
    free_cpus: float
    gpus: int
    free_gpus: int
    labels: tuple[str, ...]
    is_parents: bool


class StartAgent(msgspec.Struct, frozen=True, tag=True):
    """Start an agent on a node, with resources that Ray then gives to nothing else.

    node: as it was found. It may have left Ray and come back since, with another id. cpus: fewer if fewer are free.
    """

    node: RayNode
    settings: AgentSettings
    cpus: float
    gpus: float


class StopAgent(msgspec.Struct, frozen=True, tag=True):
    """Kill an agent."""

    number: int


class Look(msgspec.Struct, frozen=True, tag=True):
    """Tell which nodes there are now, and which have agents of other helpers."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """The helper is connected with Ray, which has these nodes."""

    nodes: list[RayNode]


class Found(msgspec.Struct, frozen=True, tag=True):
    """Ray has these nodes now. Told again and again. agents: ids of those with agents of other helpers, if asked."""

    nodes: list[RayNode]
    agents: list[str] | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The helper could not connect with Ray, or start one, and ends."""

    why: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """An agent has ended. certain: it has ended by itself, after its workers; otherwise Ray reports its actor lost."""

    number: int
    certain: bool
    why: str


class Obeyed(msgspec.Struct, frozen=True, tag=True):
    """The helper has carried out the order that it was sent last. why: set if it could not."""

    why: str | None = None


Order: TypeAlias = StartAgent | StopAgent | Look
News: TypeAlias = Started | Found | Failed | Ended | Obeyed
