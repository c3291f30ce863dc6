"""The options of a stage as vLLM's own: ``engine_args`` by the names, and with the checks, of its ``EngineArgs``."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm import EngineArgs, SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

from omni_actors.stages.base import InvalidRequest
from omni_actors.stages.vllm.options import VLLMSampling

__all__ = ["CLIENTS", "WrongEngineArgument", "engine_args", "refusal", "sampling_params"]

OURS: Mapping[str, str] = {
    "model": "the stage's `model`",
    "worker_cls": "the engine itself",
    "additional_config": "the engine itself",
}
"""Not to be given, since something else says it."""
DEFAULTS: Mapping[str, Any] = {
    "disable_log_stats": False,
    "enable_prefix_caching": False,  # so that an answer's last digits do not depend on who asked before
    "use_tqdm_on_load": False,
}
CLIENTS = (VLLMClientError, ValueError, TypeError)
"""What vLLM raises where a request is at fault."""
STRUCTS: Mapping[str, type[Any]] = {
    "structured_outputs": StructuredOutputsParams,
    "repetition_detection": RepetitionDetectionParams,
}


class WrongEngineArgument(ValueError):
    """``engine_args`` has a name that vLLM does not take. accepted: what would do, in words."""

    def __init__(self, stage: str, name: str, accepted: str) -> None:
        self.stage, self.name, self.accepted = stage, name, accepted
        super().__init__(f"stages.{stage}.options.engine_args: found {name!r}; accepted: {accepted}")


def engine_args(stage: str, model: Path, given: Mapping[str, Any], fixed: Mapping[str, Any]) -> EngineArgs:
    """fixed: what an engine depends on, so that nothing else may be given. Raises WrongEngineArgument.

    A value that vLLM refuses raises as it says: pydantic's ValidationError, ValueError, TypeError.
    """
    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name, value in given.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise WrongEngineArgument(stage, name, f"a field of vLLM's EngineArgs{meant}")
        if name in OURS:
            raise WrongEngineArgument(stage, name, f"not this one: {OURS[name]} says it")
        if name in fixed and value != fixed[name]:
            raise WrongEngineArgument(stage, name, f"{fixed[name]!r} only, for {name!r} of this engine")
    return EngineArgs(model=str(model), **{**DEFAULTS, **given, **fixed})


def sampling_params(params: VLLMSampling) -> SamplingParams:
    """Raises ``InvalidRequest``, with vLLM's message."""
    fields = {name: getattr(params, name) for name in SamplingParams.__struct_fields__ if hasattr(params, name)}
    fields = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    try:
        for name, struct in STRUCTS.items():
            if fields.get(name) is not None:
                fields[name] = struct(**fields[name])
        if fields.get("logit_bias") is not None:
            fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
        return SamplingParams(**fields, output_kind=RequestOutputKind.DELTA)
    except CLIENTS as error:
        raise refusal(error) from error


def refusal(error: Exception) -> InvalidRequest:
    """What vLLM says of a request, as ours."""
    return InvalidRequest(str(error), param=getattr(error, "parameter", None))
