"""Requests for pictures: how a caller may write a size, several answers to one prompt, and the bound on their work.

Every check is made before anything is sent to a worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omni_actors.config import Pipeline
from omni_actors.errors import InvalidRequest
from omni_actors.orchestrator.pieces import Inputs, Segments
from omni_actors.stages.diffusion.options import width_and_height

_USUAL_PIXELS, _USUAL_STEPS = 2**20, 50
"""The size and steps of a picture for which neither the request nor the stage's options define."""


def with_named_size(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return parameters whose size, if it is a pair (width, height), has the form of a request: "64x48"."""
    match params.get("size"):
        case [int() as width, int() as height]:
            return {**params, "size": f"{width}x{height}"}
    return params


def sides_of(size: Any) -> tuple[int, int] | None:
    """Return the width and the height of a size as a request has it; None if it names none."""
    try:
        return width_and_height(size)
    except (AttributeError, ValueError):
        return None


def check_count(n: Any, limit: int) -> int:
    """Return how many answers to one prompt a caller asked for. Raises InvalidRequest."""
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= limit:
        message = f"n: expected an integer from 1 to limits.max_requests, {limit}; found {n!r:.200}"
        raise InvalidRequest(message, param="n")
    return n


def check_repeatable(inputs: Inputs) -> None:
    """Raise InvalidRequest for input that arrives while its request runs: it cannot be read several times."""
    live = [kind for kind, pieces in inputs.items() if isinstance(pieces, Segments)]
    if live:
        raise InvalidRequest(f"n: live input ({live[0]}) is for one request; accepted: 1", param="n")


def seed_of(seed: Any, index: int) -> Any:
    """Return the seed of one of several answers to a prompt, within the range of signed 64-bit numbers.

    seed: of the first answer, which is returned as it is: the engine refuses what is out of range or no integer.
    """
    if type(seed) is not int or not index:
        return seed
    return (seed + index + 2**63) % 2**64 - 2**63


def checked_work(
    pipeline: Pipeline, by_stage: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any], pictures: int
) -> float:
    """Return how much work a request is, to compare it with others on its route: of a picture, pixels × steps.

    Requests without a picture count 1. Raises InvalidRequest if the pictures need more than ``limits.pixel_steps``.

    Args:
        pipeline: The pipeline that runs.
        by_stage: The parameters of each stage. What they leave open is the stage's option of the same name, or without
            one a usual number.
        given: The parameters of the request, which tell the parameter that the error names.
        pictures: The number of pictures.
    """
    limit, most = pipeline.limits.pixel_steps, 1
    for size, pixels, steps in _pictures_of(pipeline, by_stage):
        most = max(most, pixels * steps)
        if pixels * steps * pictures <= limit:
            continue
        param = "n" if pixels * steps <= limit else "size" if given.get("size") or not given.get("steps") else "steps"
        work = f"{size} pixels × {steps} steps × {pictures}"
        message = f"{param}: {work} are {pixels * steps * pictures}; limits.pixel_steps is {limit}"
        raise InvalidRequest(message, param=param)
    return float(most)


def _pictures_of(pipeline: Pipeline, by_stage: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, int, int]]:
    """Yield the size, the pixels and the steps of the picture that each denoiser makes.

    A stage that takes a size and no steps is not a denoiser: it encodes, once.
    """
    for stage, params in by_stage.items():
        if "steps" not in params and ("size" not in params or pipeline.spec(stage).params is not None):
            continue
        options = pipeline.options(stage)
        size, steps = (params.get(name) or options.get(name) for name in ("size", "steps"))
        sides = sides_of(size)
        known = (str(_USUAL_PIXELS), _USUAL_PIXELS) if sides is None else (size, sides[0] * sides[1])
        yield *known, steps if isinstance(steps, int) else _USUAL_STEPS
