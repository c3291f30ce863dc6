"""What the stages of a request can do, checked before anything is sent."""

from __future__ import annotations

from omni_actors.config import Pipeline
from omni_actors.errors import Unsupported
from omni_actors.orchestrator.routes import Route
from omni_actors.protocol.messages import CLIENT
from omni_actors.stages.registry import RawPromptUse


def require_raw_prompt(pipeline: Pipeline, route: Route, kind: str) -> None:
    """Raise Unsupported unless the stages of ``route`` that take prompts can take a raw prompt of this kind."""
    for stage, accepted in route.entries.items():
        lacks = pipeline.spec(stage).lacks_raw_prompt
        if "messages" not in accepted or lacks is None:
            continue
        why = lacks(
            RawPromptUse(
                kind=kind,
                options=pipeline.options(stage),
                upstream=set(route.sources[stage]) != {CLIENT},
                downstream=set(route.targets[stage]) != {CLIENT},
            )
        )
        if why is not None:
            raise Unsupported(stage, kind, why)
