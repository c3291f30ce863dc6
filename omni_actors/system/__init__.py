"""A running pipeline: ``OmniSystem`` and what it is made of."""

from __future__ import annotations

from omni_actors.orchestrator.inputs import PARAMS_BYTES
from omni_actors.prompts import Messages
from omni_actors.supervisor.calls import Reply
from omni_actors.system.control import Freed
from omni_actors.system.health import Health, PastExit, ReplicaHealth
from omni_actors.system.live_state import LiveState
from omni_actors.system.loras import LoraInfo
from omni_actors.system.omni_system import OmniSystem
from omni_actors.system.scaling import Scaled
from omni_actors.system.texts import Embedding, Tokens

__all__ = [
    "PARAMS_BYTES",
    "Embedding",
    "Freed",
    "Health",
    "LiveState",
    "LoraInfo",
    "Messages",
    "OmniSystem",
    "PastExit",
    "ReplicaHealth",
    "Reply",
    "Scaled",
    "Tokens",
]
