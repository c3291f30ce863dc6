"""Calls as the engine loop answers them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from omni_actors.errors import InvalidRequest, Unsupported
from omni_actors.protocol.messages import Call, CallAnswer, CallRefusal, Desired, encode
from omni_actors.worker import calls
from omni_actors.worker.calls import LARGEST_VALUE, WorkerCalls
from tests.support.controllable_engine import ControllableEcho
from tests.support.engine_loop_harness import LoopHarness, receive, send
from tests.support.stage_context import stage_context


def worker_calls() -> WorkerCalls:
    return WorkerCalls("here", lambda: 0)


def value_of(message: object) -> object:
    assert isinstance(message, CallAnswer)
    assert message.refusal is None
    return msgspec.msgpack.decode(message.value)


def test_a_call_is_answered_between_steps_in_the_order_of_the_commands(harness: LoopHarness) -> None:
    into, out = harness.input(), harness.output()
    harness.run(ControllableEcho(stage_context()))
    harness.post(Call(1, "active"))
    harness.start(7)
    harness.post(Call(2, "active"))
    assert [value_of(harness.next_message()) for _ in range(2)] == [[], [7]]
    send(into, 7, 0, text="x", last=True)
    assert receive(out).data["text"] == "x"


@pytest.mark.parametrize(
    ("call", "refusal"),
    [
        (Call(3, "sleep"), CallRefusal("there is nothing to offload", unsupported="sleep")),
        (
            Call(3, "supports", {"capability": "fly"}),
            CallRefusal("its engine has no such capability", unsupported="fly"),
        ),
        (
            Call(3, "fly"),
            CallRefusal("its engine has no such capability", unsupported="fly"),
        ),
        (Call(3, "note", {"name": "a", "text": ""}), CallRefusal("an empty note", param="text")),
        (Call(3, "note", {"text": "x"}), CallRefusal("note: missing a required argument: 'name'")),
        (Call(3, "freeze"), CallRefusal("freeze: missing a required argument: 'frozen'")),
        (Call(3, "freeze", {"frozen": "no"}), CallRefusal("freeze: frozen must be true or false", param="frozen")),
        (Call(3, "stop_profile", {"folder": 5}), CallRefusal("stop_profile: folder must be text", param="folder")),
        (
            Call(3, "supports", {"capability": []}),
            CallRefusal("supports: capability must be text", param="capability"),
        ),
        (
            Call(3, "large", {"size": LARGEST_VALUE}),
            CallRefusal(
                f"the answer has {LARGEST_VALUE + 5} bytes; at most {LARGEST_VALUE} can be sent",
                code="answer_too_large",
            ),
        ),
    ],
)
def test_a_refusal(call: Call, refusal: CallRefusal) -> None:
    assert worker_calls().answer(ControllableEcho(stage_context()), call) == CallAnswer(3, refusal=refusal)


class Unspeakable(ControllableEcho):
    """Names a file whose name is not UTF-8 where it refuses a call."""

    def capabilities(self) -> Mapping[str, str | None]:
        return {"read": None, "write": "it cannot write \udcff"}

    def call(self, capability: str, arguments: Mapping[str, object]) -> object:
        raise InvalidRequest("no file \udcff", param="file \udcff")


@pytest.mark.parametrize(
    ("capability", "refusal"),
    [
        ("read", CallRefusal("no file \\udcff", param="file \\udcff")),
        ("write", CallRefusal("it cannot write \\udcff", unsupported="write")),
    ],
)
def test_a_refusal_with_a_surrogate_can_be_sent(capability: str, refusal: CallRefusal) -> None:
    answer = worker_calls().answer(Unspeakable(stage_context()), Call(3, capability))
    assert answer == CallAnswer(3, refusal=refusal)
    assert encode(answer)


@pytest.mark.parametrize("capability", ["itself", "keyed"])
def test_a_value_that_cannot_be_sent_is_a_refusal(capability: str) -> None:
    refusal = worker_calls().answer(ControllableEcho(stage_context()), Call(3, capability)).refusal
    assert refusal is not None
    assert refusal.code == "answer_not_encodable"


def test_a_frozen_loop_receives_and_answers_and_does_not_step(harness: LoopHarness) -> None:
    into, out = harness.input(), harness.output()
    harness.run(ControllableEcho(stage_context()))
    harness.post(Call(1, "freeze", {"frozen": True}))
    harness.start(7)
    send(into, 7, 0, text="x", last=True)
    assert value_of(harness.next_message()) is None
    harness.wait_asleep()
    harness.post(Call(2, "worker_status"))
    status = value_of(harness.next_message())
    assert isinstance(status, dict)
    assert (status["requests"], status["device_bytes"]) == (1, 0)
    assert status["rss_bytes"] > 1_000_000
    assert out.try_recv() is None
    harness.post(Call(3, "freeze", {"frozen": False}))
    assert receive(out).data["text"] == "x"


def test_another_exception_ends_the_loop(harness: LoopHarness) -> None:
    harness.run(ControllableEcho(stage_context()))
    harness.post(Call(1, "note", {"name": "a", "text": ""}), Call(2, "crash"))
    assert isinstance(harness.wait_ended(), RuntimeError)
    assert harness.loop.calls.calling == "crash"


def test_an_exception_of_a_capability_of_every_worker_names_it(
    harness: LoopHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptors() -> dict[str, int]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(calls, "memory", no_descriptors)
    harness.run(ControllableEcho(stage_context()))
    harness.post(Call(1, "worker_status"))
    assert isinstance(harness.wait_ended(), OSError)
    assert harness.loop.calls.calling == "worker_status"


class Capricious(ControllableEcho):
    def capabilities(self) -> Mapping[str, str | None]:
        raise ArithmeticError


def test_an_exception_while_an_engine_names_its_capabilities_is_one_of_the_call(harness: LoopHarness) -> None:
    harness.run(Capricious(stage_context()))
    harness.post(Call(1, "note"))
    assert isinstance(harness.wait_ended(), ArithmeticError)
    assert harness.loop.calls.calling == "note"


def test_the_desired_state_is_established_in_order() -> None:
    engine = ControllableEcho(stage_context())
    notes = [Desired("note", {"name": name, "text": text}) for name, text in ("ab", "cd", "ae")]
    worker_calls().establish(engine, notes)
    assert value_of(worker_calls().answer(engine, Call(1, "notes")))["notes"] == {"a": "e", "c": "d"}  # type: ignore[index]


@pytest.mark.parametrize(
    ("desired", "error"),
    [
        (Desired("fly", {}), Unsupported),
        (Desired("note", {"name": "a", "text": ""}), InvalidRequest),
    ],
)
def test_a_desired_state_that_cannot_be_established_is_an_error(desired: Desired, error: type[Exception]) -> None:
    with pytest.raises(error):
        worker_calls().establish(ControllableEcho(stage_context()), [desired])
