"""The engine loop's side of calls: a capability of the engine is used, and the answer encoded."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from omni_actors.errors import InvalidRequest, Unsupported
from omni_actors.protocol.messages import Answer, Call, CallRefusal, Desired
from omni_actors.stages.base import Controllable, StageEngine

LARGEST_VALUE = 100 * 1024
"""Most bytes of an encoded value: it travels in one control message."""
LONGEST_REASON = 16_384


def answer(engine: StageEngine, call: Call) -> Answer:
    """Carry a call out and return the answer. Raises what the engine raises, other than ``InvalidRequest``."""
    if (why := _why_unsupported(engine, call.capability)) is not None:
        return Answer(call.number, refusal=CallRefusal(why[:LONGEST_REASON], unsupported=True))
    assert isinstance(engine, Controllable)
    try:
        value = msgspec.msgpack.encode(engine.call(call.capability, call.arguments))
    except InvalidRequest as error:
        refusal = CallRefusal(error.message[:LONGEST_REASON], param=error.param, code=error.code)
        return Answer(call.number, refusal=refusal)
    if len(value) > LARGEST_VALUE:
        message = f"the answer has {len(value)} bytes; at most {LARGEST_VALUE} can be sent"
        return Answer(call.number, refusal=CallRefusal(message, code="answer_too_large"))
    return Answer(call.number, msgspec.Raw(value))


def establish(engine: StageEngine, stage: str, desired: Sequence[Desired]) -> None:
    """Bring a new engine to the desired state of its stage. Raises Unsupported, and what the engine raises."""
    for each in desired:
        if (why := _why_unsupported(engine, each.capability)) is not None:
            raise Unsupported(stage, each.capability, why)
        assert isinstance(engine, Controllable)
        engine.call(each.capability, each.arguments)


def _why_unsupported(engine: StageEngine, capability: str) -> str | None:
    """Return None if the engine has the capability, otherwise the reason."""
    capabilities = engine.capabilities() if isinstance(engine, Controllable) else {}
    unknown = f"its engine {type(engine).__name__} does not offer it"
    return capabilities.get(capability, unknown)
