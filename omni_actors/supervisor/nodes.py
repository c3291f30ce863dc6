"""What a spawner with several nodes tells of them and of the links between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import msgspec

from omni_actors.protocol.messages import Address

NodeCondition: TypeAlias = Literal["starting", "alive", "lost", "fenced"]


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one node.

    Attributes:
        state: "starting" (its agent has no lease yet), "alive", "lost" (the parent has given its agent up, and its
            workers may still run) or "fenced" (none of them runs any more; an agent is started again).
        since: When this state began, in Unix time.
        why: Why the node is lost, or was before it started again; None if it was not.
        lease_left_s: Seconds until the node is given up unless its agent renews its lease, if it is alive. If it is
            lost, seconds until it is fenced at the latest. Else None, and on the parent's node, which has no agent.
        agent_pid: The process of its agent there; None if there is none.
        parent: Whether it is the parent's node.
    """

    state: NodeCondition
    since: float
    why: str | None = None
    lease_left_s: float | None = None
    agent_pid: int | None = None
    parent: bool = False


class LinkState(msgspec.Struct, frozen=True, kw_only=True):
    """A link between two nodes. The counters of other nodes are up to a second old.

    Attributes:
        from_node, to_node: The nodes.
        messages, payload_bytes: What has arrived since the link's creation.
        waiting_bytes: What waits in the ring on the sending node, headers included.
    """

    from_node: str
    to_node: str
    messages: int
    payload_bytes: int
    waiting_bytes: int


Links: TypeAlias = Mapping[tuple[Address, Address], LinkState]
"""The links between nodes, by producer and consumer, as their rings."""


@runtime_checkable
class HasNodes(Protocol):
    """A spawner that starts workers on several nodes."""

    def nodes(self) -> Mapping[str, NodeState]:
        """Return the state of each node, the parent's first."""
        ...

    def links(self) -> Links:
        """Return the link of each ring that has its ends on two nodes."""
        ...
