"""The terms of a request: what a caller asks of the system, and not of an engine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from omni_actors.errors import InvalidRequest
from omni_actors.orchestrator.request import ON_FAILURE, OnFailure
from omni_actors.validation import require_seconds

OutputKind: TypeAlias = Literal["delta", "cumulative"]
"""Whether an output has only what is new, or also all of its stage so far (``Output.total``)."""
OUTPUT_KINDS = get_args(OutputKind)
SamplingParams: TypeAlias = (
    Mapping[str, Mapping[str, Any] | None] | list[Mapping[str, Any] | None] | tuple[Mapping[str, Any] | None, ...]
)
"""Parameters by stage: a mapping from stage names, or a list in the order of the pipeline's stages."""
LARGEST_PRIORITY = 2**31 - 1
LONGEST_SESSION = 256


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of ``OmniSystem.generate`` and ``submit`` that are for the system.

    Making it raises InvalidRequest for a value out of bounds.

    Attributes:
        modalities: What to return, by the names that the pipeline's stages emit: "text", "audio", "transcript". By
            default the pipeline's ``modalities``, as far as the input leads to them.
        sampling_params: Parameters by stage, over ``params``: ``{"talker": {"seed": 7}}``, or a list in the order of
            the pipeline's stages. Those of stages that take no part in the request are checked and not used.
        request_id: An identifier of the caller's own, for ``abort``; by default one is made. For a list of prompts, the
            identifiers are "ID-0", "ID-1", …
        deadline_s: Seconds until the request ends with ``DeadlineExceeded``; by default ``limits.deadline_s``.
        on_failure: "replay": after the death of a worker its work for this request is repeated, and the answer
            continues as if nothing had happened; if that is impossible the request ends with ``StageCrashed``.
            "fail": the request ends with ``StageCrashed`` at once.
        priority: Of requests that wait, for a replica or in the engine of a language model, one with a lower number
            comes first; 0 by default. If the system is full, it takes the place of one with a higher number that waits
            for a replica, which ends with ``Overloaded``. What runs already is not interrupted.
        arrival_time: When the request arrived, in Unix time, if it has waited since. Its metrics count from then, and
            of waiting requests with one priority the earliest comes first.
        output_kind: "cumulative": each output also has all text or sound of its stage so far, ``Output.total``.
        session: A name of the conversation that the request belongs to, of 1 to 256 characters: its requests prefer
            one replica of each stage, whose engine may have the beginning of the prompt in its cache.
        trace_headers: A W3C trace context to continue (``traceparent``, ``tracestate``); by default the current span.
    """

    modalities: Sequence[str] | None = None
    sampling_params: SamplingParams | None = None
    request_id: str | None = None
    deadline_s: float | None = None
    on_failure: OnFailure = "replay"
    priority: int | None = None
    arrival_time: float | None = None
    output_kind: OutputKind = "delta"
    trace_headers: Mapping[str, str] | None = None
    session: str | None = None

    def __post_init__(self) -> None:
        if self.request_id is not None and not _is_text(self.request_id):
            raise _refusal("request_id", "a string without lone surrogates", self.request_id)
        if self.deadline_s is not None:
            require_seconds("deadline_s", self.deadline_s)
        if self.on_failure not in ON_FAILURE:
            message = f'on_failure: found {self.on_failure!r}; accepted: "replay", "fail"'
            raise InvalidRequest(message, param="on_failure")
        if self.output_kind not in OUTPUT_KINDS:
            message = f'output_kind: found {self.output_kind!r}; accepted: "delta", "cumulative"'
            raise InvalidRequest(message, param="output_kind")
        if self.priority is not None and not _is_priority(self.priority):
            raise _refusal("priority", f"an integer from {-LARGEST_PRIORITY - 1} to {LARGEST_PRIORITY}", self.priority)
        if self.session is not None and not _is_session(self.session):
            raise _refusal("session", f"a string of 1 to {LONGEST_SESSION} characters", self.session)
        if self.arrival_time is not None:
            expected = "seconds of Unix time, as time.time() returns them"
            require_seconds("arrival_time", self.arrival_time, expected)

    @property
    def waited_s(self) -> float:
        """Seconds since ``arrival_time``; 0 if it is in the future, because clocks differ."""
        return 0.0 if self.arrival_time is None else max(0.0, time.time() - self.arrival_time)


def _is_priority(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -LARGEST_PRIORITY - 1 <= value <= LARGEST_PRIORITY


def _is_text(value: Any) -> bool:
    """Whether a value is a string that JSON can carry, as the live state does with the identifiers of requests."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def _is_session(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= LONGEST_SESSION


def _refusal(param: str, expected: str, found: object) -> InvalidRequest:
    return InvalidRequest(f"{param}: expected {expected}, found {found!r:.200}", param=param)
