"""Answers of a given form, by a model whose tokens are random."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from importlib import resources
from typing import Any

import pytest
import torch

from omni_actors.orchestrator.inputs import PARAMS_BYTES
from omni_actors.stages.autoregressive.structure import Structure, StructureTokenizer
from omni_actors.stages.base import CLIENT, Chunk, InvalidRequest, StageRequest
from omni_actors.stages.llm.engine import LLMEngine
from tests.stages.llm.resumed_answers import check_every_cut
from tests.stages.llm.tiny_engine import PROMPTS, Results, answer, answered, submit, user
from tests.support.engine_driver import Driver

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
ASKED: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "schema": ({"json": SCHEMA}, lambda text: set(json.loads(text)) == {"city", "warm"}),
    "schema as text": ({"json": json.dumps(SCHEMA)}, lambda text: json.loads(text)["city"] in ("Rome", "Oslo")),
    "regex": ({"regex": "[ab]{3}c"}, lambda text: re.fullmatch("[ab]{3}c", text) is not None),
    "choice": ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
    "choice with a control token's text": ({"choice": ["a<|im_end|>b"]}, lambda text: text == "a<|im_end|>b"),
    "grammar": ({"grammar": 'start: "x" | "yy"'}, lambda text: text in ("x", "yy")),
}


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize(("settings", "fits"), ASKED.values(), ids=ASKED)
def test_an_answer_has_the_form_that_was_asked_for(
    engine: LLMEngine, settings: dict[str, Any], fits: Callable[[str], bool], temperature: float
) -> None:
    sampling = {"temperature": temperature, "seed": 5, "max_tokens": 60}
    text, end = answer(engine, PROMPTS[0], structured_outputs=settings, **sampling)
    assert fits(text), text
    assert end["finish_reason"] == "stop"


def test_an_object_begins_as_an_object(engine: LLMEngine) -> None:
    text, _ = answer(engine, PROMPTS[0], structured_outputs={"json_object": True}, max_tokens=5)
    assert text.startswith("{")


def test_a_resumed_answer_keeps_its_form(drive: Callable[..., Driver], engine: LLMEngine, clear_choices: None) -> None:
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 60}
    outputs = check_every_cut(drive(engine), PROMPTS[2], structured_outputs={"json": SCHEMA}, **params)
    assert set(json.loads("".join(output.data["text"] for output in outputs))) == {"city", "warm"}


@pytest.mark.parametrize(
    ("params", "param", "words"),
    [
        ({"structured_outputs": {}}, "structured_outputs", "expected one of"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "expected one of"),
        ({"structured_outputs": {"xml": True}}, "structured_outputs", "expected one of"),
        ({"structured_outputs": {"json": 7}}, "structured_outputs", "cannot be used"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "cannot be used"),
        ({"structured_outputs": {"json": {"type": "nothing"}}}, "structured_outputs", "cannot be used"),
        ({"structured_outputs": {"json": "[" * 20_000}}, "structured_outputs", "json cannot be used: .*recursion"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "only true"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "cannot be used"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs", "cannot be used"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "a list of texts"),
        ({"structured_outputs": {"grammar": "?"}}, "structured_outputs", "cannot be used"),
        ({"structured_outputs": {"grammar": ' {"grammars": [{"json_schema": {}}]}'}}, "structured_outputs", "Lark's"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "structure"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens", "structure"),
    ],
)
def test_a_form_that_cannot_be_used_is_refused(
    engine: LLMEngine, params: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        answer(engine, PROMPTS[0], **params)
    assert caught.value.param == param


def chain(rule: str, end: str, *, upper: bool, lines: int = 500) -> str:
    """Return a grammar in which each rule names the next one."""
    names = [f"{'T' if upper else 'r'}{number}" for number in range(lines - 1)]
    rules = [rule.format(name=name, next=following) for name, following in itertools.pairwise(names)]
    return "\n".join([f"start: {names[0]}", *rules, f"{names[-1]}: {end}"])


@pytest.mark.parametrize("rule", ["{name}:{next}", '{name}:{next}"a"', "{name}:{next}?"])
@pytest.mark.parametrize("upper", [False, True], ids=["rules", "terminals"])
@pytest.mark.parametrize("end", ['"a"', pytest.param("nowhere", marks=pytest.mark.slow)])
def test_a_long_chain_of_rules_ends_no_worker(engine: LLMEngine, rule: str, upper: bool, end: str) -> None:
    """It is compiled, and the answer has it or the request fails alone."""
    params = {"structured_outputs": {"grammar": chain(rule, end, upper=upper)}, "max_tokens": 4}
    if end == "nowhere":
        with pytest.raises(InvalidRequest, match="unknown name"):
            submit(engine, 0, PROMPTS[0], **params)
        return
    submit(engine, 0, PROMPTS[0], **params)
    results = Results().run(engine)
    assert set(results.text(0)) <= {"a"}
    assert 0 in results.ends or results.failed[0].param == "structured_outputs"


def test_a_grammar_has_a_bound_of_lines(engine: LLMEngine) -> None:
    """llguidance would take minutes to say what is wrong with this one."""
    grammar = chain("{name}:{next}", "nowhere", upper=False, lines=5500)
    assert len(grammar) < PARAMS_BYTES
    with pytest.raises(InvalidRequest, match="more than 500 lines") as caught:
        submit(engine, 0, PROMPTS[0], structured_outputs={"grammar": grammar})
    assert caught.value.param == "structured_outputs"


def test_the_deepest_schema_ends_no_worker(engine: LLMEngine) -> None:
    depth = 600
    inner = [
        {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}, "required": ["a"]} for n in range(depth)
    ]
    definitions = {f"d{n}": each for n, each in enumerate(inner)} | {f"d{depth}": {"type": "integer"}}
    schema = {"$ref": "#/$defs/d0", "$defs": definitions}
    assert PARAMS_BYTES * 0.8 < len(json.dumps(schema)) < PARAMS_BYTES
    submit(engine, 0, PROMPTS[0], structured_outputs={"json": schema}, max_tokens=4)
    assert Results().run(engine).text(0).startswith("{")


IMPOSSIBLE = 'start: "x" y\ny: "a" y'


@pytest.mark.parametrize("guidance", [{}, {"guidance_scale": 2.0, "negative_prompt": "hello"}], ids=["plain", "guided"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.5, "seed": 3}], ids=["greedy", "drawn"])
def test_a_form_that_fails_while_the_answer_goes_on_fails_its_request_alone(
    engine: LLMEngine, sampling: dict[str, Any], guidance: dict[str, Any]
) -> None:
    text, _ = answered(engine, PROMPTS[1], 12)
    submit(engine, 1, PROMPTS[1], max_tokens=12)
    submit(engine, 2, PROMPTS[0], structured_outputs={"grammar": IMPOSSIBLE}, **sampling, **guidance)
    results = Results().run(engine)
    assert results.text(1) == text
    assert results.failed[2].param == "structured_outputs"
    assert 2 not in results.ends


def test_a_form_that_fails_fails_a_resumed_answer_too(engine: LLMEngine) -> None:
    """Nothing can follow the token of the journal."""
    [x] = engine._vocabulary.tokenizer.encode("x", add_special_tokens=False)
    params = {"structured_outputs": {"grammar": IMPOSSIBLE}}
    engine.start(StageRequest(0, (CLIENT,), params, journal=((x,),)))
    engine.feed(0, Chunk(source=CLIENT, seq=0, last=True, tensors={}, data=user(PROMPTS[0])))
    results = Results().run(engine)
    assert results.failed[0].param == "structured_outputs"
    assert not results.ends


@pytest.fixture(scope="module")
def tokenizer(shared_tiny: LLMEngine) -> StructureTokenizer:
    vocabulary = shared_tiny._vocabulary
    return StructureTokenizer(vocabulary.tokenizer, sorted(vocabulary.end))


def walk(structure: Structure, drawn: random.Random) -> int:
    """Accept tokens that may follow until the structure fails, ends or has 400; return how many."""
    for taken in range(400):
        allowed = structure.mask(torch.zeros(283)).isfinite().nonzero().flatten().tolist()
        if not allowed or allowed == [282]:
            return taken
        structure.accept(drawn.choice([token for token in allowed if token != 282]))
    return 400


def test_an_ambiguous_grammar_is_bounded(tokenizer: StructureTokenizer) -> None:
    structure = Structure(tokenizer, {"grammar": 'start: s\ns: s s s | s s | "a" | "aa" | ""'})
    assert 50 < walk(structure, random.Random(1)) < 200
    assert "items" in str(structure.failure)


@pytest.mark.parametrize("size", [15_000, 30_000])
def test_a_regular_expression_that_takes_long_to_compile_is_refused(tokenizer: StructureTokenizer, size: int) -> None:
    """It is refused for its size, before llguidance tries to compile it for seconds."""
    pattern = "a?" * size
    for settings in ({"regex": pattern}, {"grammar": f"start: A\nA: /{pattern}/"}):
        with pytest.raises(InvalidRequest, match="too big"):
            Structure(tokenizer, settings)


def multiple(number: float) -> dict[str, Any]:
    return {"type": "integer", "multipleOf": number}


WIDE = {"type": "object", "properties": {str(number): multiple(number) for number in range(1000, 1030)}}


@pytest.mark.parametrize(
    "settings",
    [
        {"json": multiple(40_009)},
        {"json": json.dumps(multiple(40_009))},
        {"json": json.dumps(multiple(10**400))},
        {"json": {"type": "number", "multipleOf": 1.00003}},
        {"json": {"$defs": {"a": [multiple(40_009)]}}},
        {"json": WIDE},
        {"json": {"allOf": [multiple(317), multiple(331)]}},
        {"json": {"allOf": [multiple(317), multiple(331)], "properties": {"a": {"multipleOf": 0}}}},
        {"grammar": f"start: a & b\na: %json {json.dumps(multiple(317))}\nb: %json {json.dumps(multiple(331))}"},
        {"grammar": f"start: %json {json.dumps(multiple(40_009))}"},
        {"grammar": f"start: (%json\n{json.dumps(multiple(40_009))})"},
        {"grammar": 'start: "%json" | %json {"type": "integer", "multiple\\u004ff": 40009}'},
        {"grammar": 'start: %json {"type": "integer", "multipleOf": 40009, "title": "%json {"}'},
        {"grammar": 'start: %json {"multipleOf": 10007} %json {"multipleOf": 10009}'},
    ],
)
def test_numbers_with_too_many_remainders_are_refused(tokenizer: StructureTokenizer, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"multipleOf are too large: .* more than 20000"):
        Structure(tokenizer, settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"json": multiple(9_973)},
        {"json": {"type": "number", "multipleOf": 1e-9}},
        {"json": {"type": "object", "properties": {"h": multiple(24), "d": multiple(365), "w": multiple(7)}}},
        {"json": {"properties": {"multipleOf": {"type": "string"}, "a": {"multipleOf": 0.01}, "b": multiple(3600)}}},
        {"json": {"type": "object", "properties": {f"p{number}": multiple(9_973) for number in range(50)}}},
        {"grammar": 'start: "%json" | "a"'},
    ],
)
def test_usual_numbers_have_few_remainders(tokenizer: StructureTokenizer, settings: dict[str, Any]) -> None:
    assert Structure(tokenizer, settings).failure is None


def test_a_schema_does_not_change_the_options(tokenizer: StructureTokenizer, shared_tiny: LLMEngine) -> None:
    """White space would be allowed, and unknown keys."""
    options = {"whitespace_flexible": True, "whitespace_pattern": "[ ]+", "lenient": True}
    structure = Structure(tokenizer, {"json": {"type": "object", "x-guidance": options}})
    brace, space = shared_tiny._vocabulary.tokenizer.convert_tokens_to_ids(["{", "Ġ"])
    structure.accept(brace)
    assert not structure.mask(torch.zeros(283))[space].isfinite()
    with pytest.raises(InvalidRequest, match="cannot be used"):
        Structure(tokenizer, {"json": {"uniqueItems": True, "x-guidance": options}})


def test_large_schemas_do_not_reach_the_bound(tokenizer: StructureTokenizer) -> None:
    """The schema of OpenAPI documents, without what JSON schemas cannot ask for here, and some made up."""
    resource = resources.files("openapi_spec_validator") / "resources/schemas/v3.0/schema.json"
    texts = [f"word{number}" for number in range(3000)]
    fields = [{"a": {"type": "integer"}, text: {"type": "string"}} for text in texts[:100]]
    for settings in (
        {"json": supported(json.loads(resource.read_text()))},
        {"json": {"type": "object", "properties": {text: {"type": "string"} for text in texts[:480]}}},
        {"json": {"anyOf": [{"type": "object", "properties": each} for each in fields]}},
        {"json": {"enum": texts}},
        {"json": {"type": "object", "properties": {text: {"pattern": "^[a-z]{1,20}$"} for text in texts[:400]}}},
        {"choice": texts},
    ):
        drawn = random.Random(2)
        for _ in range(5):
            structure = Structure(tokenizer, settings)
            assert walk(structure, drawn), structure.failure
            assert structure.failure is None


def supported(schema: Any) -> Any:
    """Return a schema without the keys that structures do not know."""
    if isinstance(schema, list):
        return [supported(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    unknown = {"uniqueItems", "format", "not", "minProperties", "maxProperties"}
    return {name: supported(value) for name, value in schema.items() if name not in unknown}
