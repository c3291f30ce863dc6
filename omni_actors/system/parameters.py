"""The parameters of a request: which stage takes which, with defaults and drawn seeds."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from omni_actors.config import Pipeline
from omni_actors.errors import InvalidRequest
from omni_actors.validation import split_path


class Parameters:
    """Distributes the parameters of requests to the stages of one pipeline.

    Raises InvalidRequest for a pipeline whose configured defaults no engine accepts.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._schemas = {name: pipeline.spec(name).params for name in pipeline.stages}
        self._defaults = {name: self._checked(name, stage.defaults) for name, stage in pipeline.stages.items()}

    def by_stage(self, stages: Iterable[str], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the parameters of each of ``stages``: its defaults, and those of ``given`` that its engine knows.

        Parameters that are None count as not given. A seed that neither the request nor the defaults set is drawn
        here, so that a replay uses the same one. Raises InvalidRequest for a value out of bounds, and for a parameter
        that no stage of the request takes.
        """
        given = {name: value for name, value in given.items() if value is not None}
        taken: set[str] = set()
        shares: dict[str, dict[str, Any]] = {}
        for stage in stages:
            schema = self._schemas[stage]
            known = given.keys() if schema is None else given.keys() & schema.__struct_fields__
            taken |= known
            share = {**self._defaults[stage], **{name: given[name] for name in known}}
            if known:
                share = self._checked(stage, share)
            if schema is not None and share.get("seed", 0) is None:
                share["seed"] = random.getrandbits(63)
            shares[stage] = share
        if unknown := sorted(given.keys() - taken):
            raise InvalidRequest(f"no stage of this request takes the parameter {unknown[0]!r}", param=unknown[0])
        return shares

    def _checked(self, stage: str, share: dict[str, Any]) -> dict[str, Any]:
        """Return ``share`` with every default of the engine; unchanged for an engine that checks its own."""
        schema = self._schemas[stage]
        if schema is None:
            return share
        try:
            checked: dict[str, Any] = msgspec.to_builtins(msgspec.convert(share, schema))
        except msgspec.ValidationError as error:
            message, path = split_path(error)
            param = path.partition("[")[0] or None
            raise InvalidRequest(f"{param}: {message}" if param else message, param=param) from error
        return checked
