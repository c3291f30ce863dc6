"""The parameters of a request: which stage takes which, with defaults and drawn seeds."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from omni_actors.config import Pipeline
from omni_actors.errors import InvalidRequest, Unsupported
from omni_actors.system.terms import SamplingParams, Terms
from omni_actors.validation import explained

CAPABILITIES = {"guidance_scale", "mm_processor_kwargs", "tokenization_kwargs"}
"""Parameters that only some engines have a use for."""
OF_SOME_ENGINES = CAPABILITIES | {"logprobs", "seed", "structured_outputs"}
"""Parameters that are capabilities of an engine: a stage that lacks one does not support it."""


class Parameters:
    """Distributes the parameters of requests to the stages of one pipeline.

    Raises InvalidRequest for a pipeline whose configured defaults no engine accepts.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._schemas = {name: pipeline.spec(name).params for name in pipeline.stages}
        self._defaults = {name: self._checked(name, stage.defaults) for name, stage in pipeline.stages.items()}

    def by_stage(
        self, stages: Iterable[str], given: Mapping[str, Any], terms: Terms | None = None
    ) -> dict[str, dict[str, Any]]:
        """Return the parameters of each of ``stages``.

        These are its defaults; over them what its engine knows of ``given``, and of the ``terms`` the priority; and
        over them the stage's own ``sampling_params``. Parameters that are None count as not given. A seed that none of
        them sets is drawn here, so that a replay uses the same one. Raises InvalidRequest for a value out of bounds,
        a parameter that no stage of the request takes, and ``sampling_params`` that do not fit the stages.
        """
        given = {name: value for name, value in given.items() if value is not None}
        own = self._own(terms.sampling_params if terms else None)
        priority = {} if terms is None or terms.priority is None else {"priority": terms.priority}
        taken: set[str] = set()
        shares: dict[str, dict[str, Any]] = {}
        for stage in stages:
            schema, share = self._schemas[stage], own.get(stage, {})
            if given:
                known = given.keys() if schema is None else given.keys() & schema.__struct_fields__
                taken |= known
                share = {name: given[name] for name in known} | share
            if priority and schema is not None and "priority" in schema.__struct_fields__:
                share = {**priority, **share}
            share = self._checked(stage, {**self._defaults[stage], **share}) if share else self._defaults[stage].copy()
            if schema is not None and share.get("seed", 0) is None:
                share["seed"] = random.getrandbits(63)
            shares[stage] = share
        not_taken = given.keys() - taken
        for capability in CAPABILITIES & not_taken:
            why = "no engine of this request takes such arguments"
            raise Unsupported(next(iter(shares)), capability, why, param=capability)
        if not_taken:
            unknown = min(not_taken)
            raise InvalidRequest(f"no stage of this request takes the parameter {unknown!r}", param=unknown)
        return shares

    def _own(self, sampling_params: SamplingParams | None) -> dict[str, dict[str, Any]]:
        """Return the parameters that the request gives each stage for itself, checked."""
        if sampling_params is None:
            return {}
        if not isinstance(sampling_params, Mapping):
            if not isinstance(sampling_params, list | tuple):
                raise _wrong("expected a mapping or a list by stage", sampling_params)
            if len(sampling_params) != len(self._schemas):
                raise _wrong(f"expected one entry for each of the stages {', '.join(self._schemas)}", sampling_params)
            sampling_params = dict(zip(self._schemas, sampling_params, strict=True))
        own: dict[str, dict[str, Any]] = {}
        for stage, share in sampling_params.items():
            if stage not in self._schemas:
                raise _wrong(f"the pipeline has the stages {', '.join(self._schemas)}", stage)
            if not isinstance(share, Mapping | None):
                raise _wrong("expected a mapping of parameters", share, stage)
            own[stage] = {name: value for name, value in (share or {}).items() if value is not None}
            self._check_names(stage, own[stage])
            self._checked(stage, {**self._defaults[stage], **own[stage]}, f"sampling_params.{stage}.")
        return own

    def _check_names(self, stage: str, share: Mapping[str, Any]) -> None:
        schema = self._schemas[stage]
        if schema is not None and (unknown := sorted(map(str, share.keys() - set(schema.__struct_fields__)))):
            known = ", ".join(schema.__struct_fields__) or "none"
            for name in OF_SOME_ENGINES.intersection(unknown):
                why = f"the parameters of its engine are: {known}"
                raise Unsupported(stage, name, why, param=f"sampling_params.{stage}")
            raise _wrong(f"the stage takes the parameters {known}", unknown[0], stage)

    def _checked(self, stage: str, share: dict[str, Any], where: str = "") -> dict[str, Any]:
        """Return ``share`` with every default of the engine; unchanged for an engine that checks its own.

        where: what comes before a parameter's name in an error.
        """
        schema = self._schemas[stage]
        if schema is None:
            return share
        try:
            checked: dict[str, Any] = msgspec.to_builtins(msgspec.convert(share, schema))
        except msgspec.ValidationError as error:
            message, path = explained(error, schema, share)
            param = where + path.partition("[")[0] or None
            raise InvalidRequest(f"{param}: {message}" if param else message, param=param) from error
        return checked


def _wrong(expected: str, found: object, stage: str | None = None) -> InvalidRequest:
    param = "sampling_params" if stage is None else f"sampling_params.{stage}"
    return InvalidRequest(f"{param}: {expected}; found {found!r:.200}", param=param)
