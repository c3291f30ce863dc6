"""One request cannot harm the engines on vLLM; and what no request pays for, because it is done while they load."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import xgrammar
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, XgrammarGrammar

from omni_actors.errors import InvalidRequest
from omni_actors.stages.base import StageFailure, WarmsUp
from omni_actors.stages.vllm import structures
from tests.vllm.test_text import answer, ask, text_of

QUESTION = "what is this ?"


@pytest.fixture(scope="module", params=["vllm", "vllm_qwen3_thinker"])
def name(request: pytest.FixtureRequest) -> str:
    """The module's scope keeps the tests of one engine together: a process has one."""
    return str(request.param)


@pytest.fixture
def driver(drive: Callable[..., Any], name: str) -> Any:
    return drive(name)


@pytest.mark.parametrize("argument", ["kv_transfer_params", "ec_transfer_params"])
def test_a_client_cannot_set_what_vllm_moves(driver: Any, argument: str) -> None:
    plain = text_of(answer(driver, max_tokens=4))
    for value in (5, {"do_remote_prefill": True}):
        assert text_of(answer(driver, max_tokens=4, extra_args={argument: value})) == plain


def test_a_structure_that_is_refused_changes_nothing_for_the_next_ones(driver: Any) -> None:
    """vLLM's own choice would be a backend for the first one, which the next ones could not use."""
    with pytest.raises(InvalidRequest):
        answer(driver, structured_outputs={"json": {"type": "object", "patternProperties": {"(": {}}}})
    driver.live.discard(1)
    outputs = answer(driver, structured_outputs={"grammar": 'root ::= "x"'}, max_tokens=5)
    assert (text_of(outputs), outputs[-1].data["finish_reason"]) == ("x", "stop")
    assert text_of(answer(driver, structured_outputs={"json_object": True}, max_tokens=5)).startswith("{")


@pytest.mark.parametrize("n", [1, 2])
def test_an_answer_that_vllm_ends_by_an_error_fails_alone(driver: Any, name: str, n: int) -> None:
    several = {"n": n} if name == "vllm" else {}

    def accept(manager: Any, request: Any, tokens: Any) -> bool:
        return request.structured_output_request is None

    plain = text_of(answer(driver, QUESTION, max_tokens=8))
    with mock.patch.object(StructuredOutputManager, "accept_tokens", accept):
        check_fails_alone(driver, plain, structured_outputs={"regex": "[ab]{9}"}, **several, temperature=1.0, seed=1)
    assert not driver.engine._requests


def test_a_structure_that_is_too_large_to_convert_is_refused(driver: Any) -> None:
    """vLLM converts it before it takes the request, in the engine's thread. The threads that go on are few."""
    convert, over = xgrammar.Grammar.from_json_schema, threading.Event()

    def wait(*args: Any, **kwargs: Any) -> Any:
        over.wait()
        return convert(*args, **kwargs)

    with mock.patch.object(structures, "CHECK_S", 0.01), mock.patch.object(xgrammar.Grammar, "from_json_schema", wait):
        for reason in (*["takes more than 0.01 s to convert"] * structures.MOST_LATE, "2 others that are too large"):
            with pytest.raises(InvalidRequest, match=reason) as refused:
                answer(driver, structured_outputs={"json": {"enum": ["x"]}})
            assert refused.value.param == "structured_outputs"
            driver.live.discard(1)
            assert not driver.engine._requests
    assert answer(driver, max_tokens=1), "one without a structure is not refused"
    over.set()
    for thread in list(structures._late):
        thread.join()
    assert text_of(answer(driver, structured_outputs={"json": {"enum": ["x"]}})) == '"x"'


def test_a_structure_with_a_costly_mask_fails_its_own_request(driver: Any) -> None:
    """Nothing can stop xgrammar, so a thread goes on with the mask when both requests have ended."""
    plain, over, ended = text_of(answer(driver, QUESTION, max_tokens=8)), threading.Event(), list[float]()

    def compute(grammar: Any, bitmask: Any, row: int) -> None:
        while time.thread_time() < 30 and not over.is_set():
            pass
        ended.append(time.thread_time())

    with mock.patch.object(structures, "MASK_S", 0.02), mock.patch.object(XgrammarGrammar, "fill_bitmask", compute):
        check_fails_alone(driver, plain, structured_outputs={"regex": "[ab]{9}"}, max_tokens=8)
    assert not ended
    assert set(text_of(answer(driver, QUESTION, structured_outputs={"regex": "a{9}"}, max_tokens=8))) == {"a"}
    [thread] = structures._late
    assert os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) == structures.LATE_NICE
    over.set()
    thread.join()
    assert not structures._late


def test_a_structure_that_is_too_large_to_compile_fails_its_own_request(driver: Any) -> None:
    """It holds back no other structures either: vLLM compiles them one after the other on a machine of two cores."""
    plain, over, compiled = text_of(answer(driver, QUESTION, max_tokens=8)), threading.Event(), list[str]()
    compile_grammar = XgrammarBackend.compile_grammar

    def compile_slowly(backend: Any, kind: Any, spec: str, **arguments: Any) -> Any:
        if spec == "[ab]{9}":
            over.wait(30)
        compiled.append(spec)
        return compile_grammar(backend, kind, spec, **arguments)

    with (
        mock.patch.object(structures, "COMPILE_S", 0.02),
        mock.patch.object(XgrammarBackend, "compile_grammar", compile_slowly),
    ):
        check_fails_alone(driver, plain, structured_outputs={"regex": "[ab]{9}"}, max_tokens=8)
    assert not compiled
    assert set(text_of(answer(driver, QUESTION, structured_outputs={"regex": "a{9}"}, max_tokens=8))) == {"a"}
    over.set()
    for thread in list(structures._late):
        thread.join()


def test_a_structure_that_is_left_while_it_compiles_holds_back_no_other(driver: Any) -> None:
    """Nothing asks for it any more. On a machine of two cores, one thread compiles."""
    begun, over, compiled = threading.Event(), threading.Event(), list[str]()
    compile_grammar = XgrammarBackend.compile_grammar

    def compile_slowly(backend: Any, kind: Any, spec: str, **arguments: Any) -> Any:
        if spec == "[ab]{9}":
            begun.set()
            over.wait(10)
        compiled.append(spec)
        return compile_grammar(backend, kind, spec, **arguments)

    with (
        mock.patch.object(driver.engine._structures, "_compilers", structures._Threads(1)),
        mock.patch.object(structures, "COMPILE_S", 0.02),
        mock.patch.object(XgrammarBackend, "compile_grammar", compile_slowly),
    ):
        ask(driver, 1, QUESTION, structured_outputs={"regex": "[ab]{9}"}, max_tokens=8)
        assert begun.wait(10)
        driver.abort(1)
        with mock.patch.object(structures, "COMPILE_S", 10.0):
            answer(driver, QUESTION, structured_outputs={"regex": "b{9}"}, max_tokens=8)
        assert compiled == ["b{9}"]
    over.set()
    for thread in list(structures._late):
        thread.join()


def check_fails_alone(driver: Any, plain: str, **params: Any) -> None:
    """Ask with a structure that fails, and beside it without one, for the answer ``plain``."""
    ask(driver, 1, QUESTION, **params)
    ask(driver, 2, QUESTION, max_tokens=8)
    outputs = driver.run()
    [failure] = outputs[1]
    assert isinstance(failure, StageFailure)
    assert isinstance(failure.error, InvalidRequest)
    assert failure.error.param == "structured_outputs"
    assert text_of(outputs[2]) == plain


def test_warming_up_leaves_nothing_behind(driver: Any) -> None:
    engine = driver.engine
    before = engine.gauges()
    assert isinstance(engine, WarmsUp)
    engine.warm_up()
    assert not engine.busy
    assert engine.gauges() == before
    with mock.patch.object(engine._llm.model_config, "max_logprobs", 0):
        engine.warm_up()
    assert not engine.busy


def test_a_token_that_the_model_lacks_fails_its_own_request(driver: Any, name: str) -> None:
    engine = driver.engine
    reader, size = (engine._vocabulary, "size") if name == "vllm" else (engine._processor, "_size")
    assert getattr(reader, size) <= engine._llm.model_config.get_vocab_size()
    with mock.patch.object(reader, size, 2), pytest.raises(InvalidRequest, match="the model has no token"):
        answer(driver)
    driver.live.discard(1)
