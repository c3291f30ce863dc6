"""Bodies: their cost is bounded before they are decoded, and whatever is wrong with one is a 400.

Most are read in this process, as the handlers do it. A server gets some of the fuzzer's in the end.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omni_actors.serve.api import json_body
from omni_actors.serve.api.audio_schemas import SpeechRequest
from omni_actors.serve.api.image_schemas import ImageEditRequest
from omni_actors.serve.api.json_body import MAX_DEPTH, MAX_SLOW_BYTES, MAX_VALUES, DecodingCost, read_json
from omni_actors.serve.api.response_schemas import ResponsesRequest
from omni_actors.serve.api.schemas import (
    MAX_SHORT,
    ChatRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from omni_actors.serve.http.errors import MAX_QUOTE, bad_request, quote_value
from tests.support.request_bodies import SCHEMAS, error_object, parsed_or_refused, refusal, request, take


def chat(rest: bytes) -> bytes:
    return b'{"model": "studio", "messages": [{"role": "user", "content": "hi"}]' + rest + b"}"


# the bounds


PLACES = [b"%s", b'{"messages": %s}', b'{"messages": [%s]}', b'{"stop": %s}', b'{"unknown": %s}', b'{"model": %s}']
PLACES += [b'{"mm_processor_kwargs": {"fps": %s}}', b'{"metadata": %s}', b'{"audio": {"voice": %s}}']


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, 1500, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_deep_nesting_anywhere_is_refused(place: bytes, levels: int, opening: bytes, closing: bytes) -> None:
    body = place % (opening * levels + b"1" + closing * levels)
    assert refusal("chat", body)["code"] in ("nested_too_deeply", "too_many_values")
    assert refusal("chat", place % (opening * levels))["code"] in ("nested_too_deeply", "too_many_values")


def test_nesting_up_to_the_bound_passes() -> None:
    levels = MAX_DEPTH - 1  # the body is one
    params = take("chat", chat(b', "deep": ' + b"[" * levels + b"]" * levels))
    assert "deep" in params
    assert (
        refusal("chat", chat(b', "deep": ' + b"[" * (levels + 1) + b"]" * (levels + 1)))["code"] == "nested_too_deeply"
    )


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (b"[" + b"[]," * MAX_VALUES + b"1]", "too_many_values"),
        (b"[" + b'{"a":{}},' * MAX_VALUES + b"1]", "too_many_values"),
        (b"[" + b"9e-324," * MAX_VALUES + b"1]", "too_many_values"),
        (b"1" * MAX_VALUES * 2, "too_many_values"),
        (b'"' * MAX_VALUES * 4, "too_many_values"),
        (b" " * 2 * MAX_SLOW_BYTES + b"1", "too_much_text"),
        (b'"' + b"\\n" * 2 * MAX_SLOW_BYTES + b'"', "too_much_text"),
        (b'"' + "é".encode() * MAX_SLOW_BYTES + b'"', "too_much_text"),
        (b'"' + b"A" * 2 * MAX_SLOW_BYTES + b'\\u00e9"', "too_much_text"),
    ],
)
def test_a_body_that_is_slow_to_decode_is_refused_before(
    value: bytes, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(json_body, "_decoded")
    assert refusal("chat", chat(b', "user": ' + value))["code"] == code


@pytest.mark.parametrize(
    "messages",
    [
        *(
            [{"role": "user", "content": text}]
            for text in ("A" * 32_000_000, "a sentence, with [punctuation]: {1, 2}\n" * 20_000, "é" * 900_000)
        ),
        [{"role": "user", "content": "hello, you"}] * (MAX_VALUES // 11),
    ],
    ids=["base64", "punctuation", "beyond ASCII", "many messages"],
)
def test_a_large_conversation_passes(messages: list[dict[str, str]]) -> None:
    body = json.dumps({"model": "studio", "messages": messages}, ensure_ascii=False).encode()
    assert trio.run(read_json, request(body))["messages"] == messages


TEXT = st.text() | st.text('"\\\n[1é')
"""Half of the texts are of what is written with escapes or looks like the end of a string."""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda below: st.lists(below, max_size=4) | st.dictionaries(TEXT, below, max_size=4),
    max_leaves=20,
)


@given(JSON, st.booleans(), st.integers(1, 7))
def test_the_cost_is_the_same_in_slices_of_any_size(document: Any, ascii: bool, size: int) -> None:
    """The counts equal those of a tokenizer."""
    body = b"[" + json.dumps(document, ensure_ascii=ascii).encode()
    strings = re.findall(rb'"(?:[^"\\]|\\.)*"', body, re.DOTALL)
    outside = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", body, flags=re.DOTALL)
    values = len(strings) + len(re.findall(rb"[\[\]{},:0-9]", outside))
    texts = [string[1:-1].replace(rb"\\", b"").replace(rb"\"", b"") for string in strings]
    slow = sum(len(text) for text in texts if not text.isascii() or rb"\u" in text)
    cost = DecodingCost()
    for at in range(0, len(body), size):
        cost.add(body[at : at + size])
    assert not cost._in_string
    assert cost._depth == 1
    assert cost._values == values
    assert cost._slow == slow + len(outside) + body.count(b"\\")


# errors are short


def test_an_error_is_short_whatever_was_sent() -> None:
    for text in ("x" * 10_000_000, "\0" * 10_000, "\ud800" * 10_000):
        assert len(error_object(bad_request(text, text, "code"))["param"]) == MAX_QUOTE
        assert len(quote_value(text)) <= MAX_QUOTE
    assert len(quote_value({"a": [{"b": list("x" * 1000)}] * 1000})) <= MAX_QUOTE
    assert quote_value("short") == "'short'"


HUGE = b"A" * (4 * MAX_SHORT)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat", b'{"model": "' + HUGE + b'", "messages": [{"role": "user", "content": ""}]}'),
        ("speech", b'{"model": "' + b"A" * 1000 + b'", "input": ""}'),
        ("chat", b'{"messages": [{"role": "' + HUGE + b'"}]}'),
        ("chat", b'{"messages": [{"role": "user", "content": [{"type": "' + HUGE + b'"}]}]}'),
        ("chat", chat(b', "stop": ["' + HUGE + b'"]')),
        ("chat", chat(b', "n": "' + HUGE + b'"')),
        ("chat", chat(b', "n": {"text": "' + HUGE + b'"}')),
        ("chat", chat(b', "n": "' + rb"\u0000" * 10_000 + b'"')),
        ("chat", chat(b', "' + HUGE + b'": 1')),
        ("chat", chat(b', "mm_processor_kwargs": {"' + HUGE + b'": 1}')),
        ("chat", chat(b', "mm_processor_kwargs": {"' + b"A" * 1000 + b'": 1}')),
        ("speech", b'{"model": "studio", "input": "' + HUGE + b'"}'),
    ],
)
def test_a_long_text_in_a_wrong_place(path: str, body: bytes) -> None:
    assert refusal(path, body)["message"]


def test_a_value_that_looks_like_an_errors_path_is_a_value() -> None:
    error = refusal("chat", b'{"model": "studio", "messages": [{"role": "x` - at `$.model`", "content": ""}]}')
    assert error["param"] == "messages[0].role"


@pytest.mark.parametrize(
    "value",
    [
        *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"1" * 5000, b"-" + b"1" * 5000),
        *(b'"\\ud800"', b'"\\udc00\\ud800"', b'"\xed\xa0\x80"', b'"\\ud800', b'"\x00"', b'"\xff"', b"\xef\xbb\xbf1"),
    ],
)
def test_numbers_and_strings_that_are_not_json(value: bytes) -> None:
    assert refusal("chat", chat(b', "user": ' + value))["code"] == "invalid_json"


def test_odd_json_that_is_valid() -> None:
    """A repeated key counts once, NUL is a character, and an integer may be large."""
    params = take("chat", chat(b', "a": 1, "a": "\\u0000", "b": ' + b"9" * 4000))
    assert params == {"a": "\0", "b": int("9" * 4000)}


# fuzz


STRANGE = st.sampled_from(
    [
        "",
        "\0",
        "x" * 5000,
        "\x7f" * 300,
        "é" * 300,
        "𝄞",
        "1e999",
        "nan",
        "0",
        "true",
        "user",
        "text",
        "wav",
        "pcm",
        "studio",
    ]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.sampled_from([0, 1, 2**63, 2**64, -(2**63) - 1])
    | st.floats(allow_nan=False, allow_infinity=False)
    | STRANGE
    | st.text(max_size=20),
    lambda below: (
        st.lists(below, max_size=4)
        | st.dictionaries(STRANGE | st.sampled_from(["type", "role", "content", "url", "format"]), below, max_size=4)
    ),
    max_leaves=12,
)
KNOWN = [
    *ChatRequest.__struct_fields__,
    *SpeechRequest.__struct_fields__,
    *EmbeddingRequest.__struct_fields__,
    *TokenizeRequest.__struct_fields__,
    *ImageEditRequest.__struct_fields__,
    *ResponsesRequest.__struct_fields__,
    "logit_bias",
    "user",
    "self",
    "seed",
    "top_k",
]
FIELDS = st.dictionaries(st.sampled_from(KNOWN) | STRANGE, VALUES, max_size=5)
GOOD = [
    {},
    {"model": "studio", "messages": [{"role": "user", "content": "hi"}]},
    {"model": "studio", "input": "hi"},
    {"model": "studio", "prompt": "hi"},
    {"tokens": [1, 2]},
    {"model": "studio", "prompt": "hi", "images": [{"image_url": "data:image/png;base64,AAAA"}]},
    {"model": "studio", "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]},
]


@given(st.sampled_from(list(SCHEMAS)), st.sampled_from(GOOD), FIELDS)
def test_any_object_is_parsed_or_refused(path: str, good: dict[str, Any], fields: dict[str, Any]) -> None:
    parsed_or_refused(path, json.dumps({**good, **fields}).encode())


TOKENS = [*b'{ } [ ] , : " \\ \\u d800 1 - e9 . null'.split(), b"\xff", b" "]


@given(st.sampled_from(["chat", "speech"]), st.lists(st.sampled_from(TOKENS) | st.binary(max_size=3)).map(b"".join))
@example("chat", b'{"\\')
def test_any_bytes_are_parsed_or_refused(path: str, body: bytes) -> None:
    parsed_or_refused(path, body)


# a server


SERVED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", GOOD[1]),
    ("/v1/audio/speech", GOOD[2]),
    ("/v1/completions", GOOD[3]),
    ("/v1/embeddings", GOOD[2]),
    ("/v1/responses", GOOD[2]),
    ("/v1/responses", GOOD[6]),
    ("/v1/images/generations", GOOD[3]),
    ("/v1/images/edits", GOOD[5]),
    ("/tokenize", GOOD[3]),
    ("/tokenize", GOOD[1]),
    ("/detokenize", GOOD[4]),
]


@pytest.mark.parametrize("examples", [35, pytest.param(100, marks=pytest.mark.slow)])
def test_a_server_answers_any_object_with_a_result_or_an_error(studio: Any, examples: int) -> None:
    @settings(max_examples=examples)
    @given(st.sampled_from(SERVED), FIELDS)
    def answered(served: tuple[str, dict[str, Any]], fields: dict[str, Any]) -> None:
        path, good = served
        answer = studio.http.post(path, content=json.dumps({**good, **fields}).encode())
        # 501: the echo engine has no tokenizer and no embeddings.
        assert answer.status_code in (200, 501) or 400 <= answer.status_code < 500, answer.text
        if answer.status_code != 200:
            assert len(answer.content) < 4096
            assert answer.json()["error"]["message"]

    answered()


def test_a_server_refuses_deep_nesting(studio: Any) -> None:
    for body in (b"[" * 100_000, chat(b', "stop": ' + b'{"a":' * 100_000), chat(b', "a": ' + b"[" * 500 + b"]" * 500)):
        answer = studio.http.post("/v1/chat/completions", content=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
