"""Routes through a shipped pipeline and through random graphs."""

from __future__ import annotations

from dataclasses import dataclass
from graphlib import CycleError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors import config
from omni_actors.errors import InvalidRequest
from omni_actors.orchestrator.routes import Node, Route, plan, topological
from omni_actors.protocol.messages import CLIENT

VOICE = {name: Node(s.accepts, s.inputs, s.emits) for name, s in config.load("voice").stages.items()}


def test_a_written_question_answered_in_text_uses_one_stage() -> None:
    assert plan(VOICE, ["messages"], ["text"]) == Route(
        ("llm",), {"llm": (CLIENT,)}, {"llm": (CLIENT,)}, {"llm": ("messages",)}
    )


def test_a_spoken_question_with_written_messages_enters_at_two_stages() -> None:
    route = plan(VOICE, ["audio", "messages"], ["text"])
    assert route.stages == ("whisper", "llm")
    assert route.sources == {"whisper": (CLIENT,), "llm": (CLIENT, "whisper")}
    assert route.targets == {"whisper": ("llm",), "llm": (CLIENT,)}
    assert route.entries == {"whisper": ("audio",), "llm": ("messages",)}


def test_a_question_answered_in_speech_uses_every_downstream_stage() -> None:
    route = plan(VOICE, ["messages"], ["text", "audio"])
    assert route.stages == ("llm", "acoustic", "vocoder")
    assert route.targets == {"llm": (CLIENT, "acoustic"), "acoustic": ("vocoder",), "vocoder": (CLIENT,)}


def test_a_script_skips_the_language_model() -> None:
    route = plan(VOICE, ["script"], ["audio"])
    assert route.stages == ("acoustic", "vocoder")
    assert route.sources == {"acoustic": (CLIENT,), "vocoder": ("acoustic",)}


def test_a_transcript_needs_only_the_recognizer() -> None:
    assert plan(VOICE, ["audio"], ["transcript"]).stages == ("whisper",)


@pytest.mark.parametrize(
    ("kinds", "modalities", "param", "text"),
    [
        (["smell"], ["text"], "input", "'smell'"),
        (["messages"], ["smell"], "modalities", "'smell'"),
        ([], ["text"], "input", "no input"),
        (["messages"], [], "modalities", "no modalities"),
        (["script"], ["text"], "modalities", "'script'"),
        (["messages"], ["text", "transcript"], "modalities", "'transcript'"),
        (["messages", "script"], ["text"], "modalities", "'script'"),
        (["messages", "audio"], ["transcript"], "modalities", "'messages'"),
    ],
)
def test_a_request_without_a_route_is_refused(kinds: list[str], modalities: list[str], param: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plan(VOICE, kinds, modalities)
    assert caught.value.param == param
    assert text in caught.value.message


def test_a_cycle_is_refused() -> None:
    with pytest.raises(CycleError):
        topological({"a": Node(inputs=("b",)), "b": Node(inputs=("a",))})


@dataclass
class Case:
    """A stage graph and what a request brings and asks for."""

    nodes: dict[str, Node]
    kinds: set[str]
    modalities: set[str]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a graph of up to 7 stages, in any order, and a request for kinds and modalities that it knows."""
    count = draw(st.integers(1, 7))
    nodes = {}
    for n in range(count):
        inputs = draw(st.lists(st.sampled_from(range(n)), unique=True, max_size=3)) if n else []
        accepts = draw(st.lists(st.sampled_from("abc"), unique=True, min_size=0 if inputs else 1))
        emits = f"m{n}" if draw(st.booleans()) else None
        nodes[f"s{n}"] = Node(tuple(accepts), tuple(f"s{i}" for i in inputs), emits)
    nodes = {name: nodes[name] for name in draw(st.permutations(list(nodes)))}
    known_kinds = sorted({kind for node in nodes.values() for kind in node.accepts})
    known_modalities = sorted(node.emits for node in nodes.values() if node.emits) or ["none"]
    return Case(
        nodes,
        draw(st.sets(st.sampled_from(known_kinds), min_size=1)),
        draw(st.sets(st.sampled_from(known_modalities), min_size=1)),
    )


@given(cases())
def test_a_route_has_exactly_the_stages_between_input_and_output(case: Case) -> None:
    nodes = case.nodes
    upstream = {name: _closure(name, {n: set(node.inputs) for n, node in nodes.items()}) for name in nodes}
    enters = {name for name, node in nodes.items() if case.kinds & set(node.accepts)}
    leaves = {name for name, node in nodes.items() if node.emits in case.modalities}
    between = {name for name in nodes if upstream[name] & enters and any(name in upstream[end] for end in leaves)}
    served = {nodes[name].emits for name in between & leaves} == case.modalities
    used = {kind for name in between for kind in nodes[name].accepts if kind in case.kinds} == case.kinds
    try:
        route = plan(nodes, case.kinds, case.modalities)
    except InvalidRequest:
        assert not (between and served and used)
        return
    assert served
    assert used
    assert set(route.stages) == between
    position = {name: n for n, name in enumerate(route.stages)}
    for name in route.stages:
        assert route.sources[name], "every stage is fed"
        assert route.targets[name], "every stage feeds something"
        for source in set(route.sources[name]) - {CLIENT}:
            assert position[source] < position[name]
            assert name in route.targets[source]
        for target in set(route.targets[name]) - {CLIENT}:
            assert name in route.sources[target]
        assert (CLIENT in route.sources[name]) == (name in route.entries)
        assert (CLIENT in route.targets[name]) == (name in leaves)
        assert len(set(route.sources[name])) == len(route.sources[name])
    assert {kind for kinds in route.entries.values() for kind in kinds} == case.kinds


def _closure(name: str, inputs: dict[str, set[str]]) -> set[str]:
    """Return ``name`` and all its upstream stages."""
    return {name}.union(*(_closure(source, inputs) for source in inputs[name]))
