"""Answers of workers to calls."""

from __future__ import annotations

import msgspec
import pytest
import trio.testing

from omni_actors.errors import InvalidRequest
from omni_actors.protocol.messages import Address, CallAnswer
from omni_actors.supervisor.calls import Calls, PendingCall


@pytest.mark.parametrize(
    "value", [b"\x81\x81\x01\x01\x01", b"\x91" * 60_000 + b"\xc0", b"\xa1\xff"], ids=["keys", "depth", "text"]
)
async def test_an_answer_that_cannot_be_decoded_is_an_error_of_its_call(
    value: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    """A mapping with a mapping as its key; values that are nested too deeply; text that is not UTF-8."""
    calls, pending = Calls(), PendingCall(Address("first", 0), 1, "x", 5.0)
    message = calls.begin(pending, {})
    assert message is not None
    calls.answer(CallAnswer(message.number, msgspec.Raw(value)))
    reply = await pending.wait()
    assert isinstance(reply.error, InvalidRequest)
    assert reply.error.code == "answer_not_encodable"
