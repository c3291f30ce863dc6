"""Conversion of a stage's options and a request's parameters to vLLM's ``EngineArgs`` and ``SamplingParams``."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm import EngineArgs, SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams

from omni_actors.stages.base import InvalidRequest, StageContext
from omni_actors.stages.vllm.options import VLLMSampling

RESERVED: Mapping[str, str] = {
    "model": "the stage's `model`",
    "worker_cls": "the engine itself",
    "additional_config": "the engine itself",
    "spec_method": "`speculative_config`",
    "spec_model": "`speculative_config`",
    "spec_tokens": "`speculative_config`",
}
"""Fields of ``EngineArgs`` that ``engine_args`` must not have, with what sets each of them."""
DEFAULTS: Mapping[str, Any] = {
    "disable_log_stats": False,
    "enable_prefix_caching": False,  # so that an answer's last digits do not depend on earlier requests
    # vLLM's "auto" takes the first request's backend for all that follow. "xgrammar" refuses what it does not know.
    "structured_outputs_config": {"backend": "xgrammar"},
    "scheduling_policy": "priority",  # in order of arrival, unless requests have priorities
    "use_tqdm_on_load": False,
}
CLIENT_ERRORS = (VLLMClientError, ValueError, TypeError)
"""What vLLM raises for a request that is wrong."""
STRUCTS: Mapping[str, type[Any]] = {
    "structured_outputs": StructuredOutputsParams,
    "repetition_detection": RepetitionDetectionParams,
}
"""The parameters that vLLM takes as structs."""
_SEEDS = 2**62
"""What is added to a seed that vLLM would take for none."""


class WrongEngineArgument(ValueError):
    """A stage's ``engine_args`` has a name or value that the engine does not accept.

    stage, name: where it was found. accepted: what the engine accepts, in words.
    """

    def __init__(self, stage: str, name: str, accepted: str) -> None:
        self.stage, self.name, self.accepted = stage, name, accepted
        super().__init__(f"stages.{stage}.options.engine_args: found {name!r}; accepted: {accepted}")


def parallel(context: StageContext, given: dict[str, Any]) -> dict[str, Any]:
    """Return ``given`` with the tensor parallelism of a worker that spans several devices (``devices_per_replica``).

    Raises WrongEngineArgument: ``given`` uses another number of devices.
    """
    pipeline = given.get("pipeline_parallel_size") or 1
    tensor = given.get("tensor_parallel_size") or max(1, context.device_count // pipeline)
    if context.device == "cpu":
        return given
    if tensor * pipeline != context.device_count:
        accepted = f"sizes whose product is devices_per_replica, {context.device_count}; they are {tensor}, {pipeline}"
        raise WrongEngineArgument(context.stage, "tensor_parallel_size, pipeline_parallel_size", accepted)
    return {**given, "tensor_parallel_size": tensor}


def engine_args(stage: str, model: Path, given: Mapping[str, Any], fixed: Mapping[str, Any]) -> EngineArgs:
    """Return vLLM's ``EngineArgs`` for a stage.

    given: the stage's ``engine_args``. fixed: fields that the engine depends on, which ``given`` must not change.

    Raises WrongEngineArgument for a name. For a value it raises what vLLM raises: pydantic's ValidationError,
    ValueError, TypeError.
    """
    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name, value in given.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise WrongEngineArgument(stage, name, f"a field of vLLM's EngineArgs{hint}")
        if name in RESERVED:
            raise WrongEngineArgument(stage, name, f"any field but this one, which {RESERVED[name]} sets")
        if name in fixed and value != fixed[name]:
            raise WrongEngineArgument(stage, name, f"only {fixed[name]!r} as the {name!r} of this engine")
    return EngineArgs(model=str(model), **{**DEFAULTS, **given, **fixed})


def sampling_params(params: VLLMSampling) -> SamplingParams:
    """Return a request's parameters as vLLM's. Raises ``InvalidRequest``, with vLLM's message."""
    fields = {name: getattr(params, name) for name in SamplingParams.__struct_fields__ if hasattr(params, name)}
    fields = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    try:
        for name, struct in STRUCTS.items():
            if fields.get(name) is not None:
                fields[name] = struct(**fields[name])
        if fields.get("logit_bias") is not None:
            fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
        if params.seed is not None and -fields.get("n", 1) <= params.seed < 0:
            fields["seed"] = params.seed + _SEEDS  # vLLM takes -1 for none; the answers have seed, seed + 1, …
        return SamplingParams(**fields, output_kind=RequestOutputKind.DELTA)
    except CLIENT_ERRORS as error:
        raise refusal(error) from error


def refusal(error: Exception) -> InvalidRequest:
    """Return vLLM's error about a request as an ``InvalidRequest``."""
    return InvalidRequest(str(error), param=getattr(error, "parameter", None))
