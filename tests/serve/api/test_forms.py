"""Forms: the parts of a body arrive unchanged, and whatever is wrong with one is a 400."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors import config
from omni_actors.serve.api import form_body
from omni_actors.serve.api.form_body import MAX_CONTENT_TYPE, MAX_FIELD_BYTES, MAX_PARTS
from omni_actors.serve.api.json_body import SLICE_BYTES
from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.routes.common import typed
from tests.support.request_bodies import MULTIPART, error_object, parsed_or_refused, refusal, take


def part(name: str, value: bytes, more: str = "") -> bytes:
    return f'--XX\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


END = b"--XX--\r\n"


@pytest.mark.parametrize("size", [0, 10, SLICE_BYTES - 1, SLICE_BYTES, 5 * SLICE_BYTES])
def test_a_file_arrives_unchanged(size: int) -> None:
    """Also if it contains something like a boundary, in one slice or across two."""
    file = (b"\r\n--X" * size)[:size]
    body = part("model", b"studio") + part("file", file, '; filename="a.wav"') + part("empty", b"") + END
    assert take("transcription", body) == {"files": [file]}


@pytest.mark.parametrize("more", ["", "; filename*=UTF-8''na%C3%AFve.wav", '; filename=""'])
def test_a_part_with_the_name_of_the_file_needs_no_filename(more: str) -> None:
    file = b"\xff" * (MAX_FIELD_BYTES + 1)
    assert take("transcription", part("model", b"studio") + part("file", file, more) + END) == {"files": [file]}


def test_several_files_arrive_in_order_under_either_name() -> None:
    body = part("model", b"studio") + part("prompt", b"a cat")
    for name, file in (("image[]", b"one"), ("image", b"two"), ("image[]", b"three")):
        body += part(name, file, '; filename="a.png"')
    assert take("edit_form", body + END) == {"files": [b"one", b"two", b"three"]}


def test_the_charset_of_a_form_has_no_effect() -> None:
    body = part("model", b"studio") + part("word", "é".encode()) + END
    for charset in ("utf-7", "undefined", "idna", "nothing"):
        assert take("transcription", body, f"{MULTIPART}; charset={charset}")["word"] == "é"


def test_a_long_content_type_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing 64 KiB of it kept the event loop busy for 50 ms."""
    body = part("model", b"studio") + END
    assert take("transcription", body, MULTIPART + " " * (MAX_CONTENT_TYPE - len(MULTIPART)))["files"] == []
    monkeypatch.setattr(form_body, "parse_options_header", None)
    error = refusal("transcription", body, MULTIPART + ";" * 65_000)
    found = f"{len(MULTIPART) + 65_000} characters; the limit is {MAX_CONTENT_TYPE}"
    assert error["message"] == f"the multipart form cannot be read: its content type has {found}"
    assert error["code"] == "invalid_form"


def test_the_values_of_a_list_arrive_in_order() -> None:
    body = part("model", b"studio") + part("tags[]", b"one") + part("tags", b"two") + part("tags[]", b"")
    body += part("tags[]", b"three") + END
    assert take("transcription", body) == {"files": [], "tags[]": ["one", "three"], "tags": "two"}


def test_a_name_comes_from_the_content_disposition_alone() -> None:
    body = part("model", b"studio") + part("word", b"x", '\r\nContent-Type: text/plain; name="other"') + END
    assert take("transcription", body) == {"files": [], "word": "x"}


def test_a_form_at_its_bounds_is_read() -> None:
    word = "x" * MAX_FIELD_BYTES
    body = part("model", b"studio") * (MAX_PARTS - 1) + part("word", word.encode()) + END
    assert take("transcription", body) == {"files": [], "word": word}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "missing_required_parameter"),
        (b"--YY\r\n", "invalid_form"),
        (b"--XX\r\n\r\nno name\r\n" + END, "invalid_form"),
        (b"--XX\r\nA: b\r\n\r\nno name\r\n" + END, "invalid_form"),
        (part("model", b"studio") + b"--XX\r\nA: b\r\n\r\nno name\r\n" + END, "invalid_form"),
        (part("model", b"studio") * (MAX_PARTS + 1) + END, "invalid_form"),
        (part("model", b"x" * (MAX_FIELD_BYTES + 1)) + END, "invalid_form"),
        (part("model", b"\xff") + END, "invalid_form"),
        (part("file", b"", '; filename="a"') * 2 + END, "invalid_form"),
        (part("model", b"studio") + part("file", b"sound", '; filename="a"')[:-4], "invalid_form"),
        (part("file", b"sound", '; filename="a"') + part("model", b"studio"), "invalid_form"),
        (part("other", b"", '; filename="a"') + END, "invalid_value"),
        (part("model", b"studio", "\r\nA: " + "b" * 10_000) + END, "invalid_form"),
        (part("model", b"studio", "\r\nA: b" * 100) + END, "invalid_form"),
        (part("model", b"studio") + part("temperature", b"1e999") + END, "invalid_value"),
        (part("model", b"studio") + part("temperature", b"nan") + END, "invalid_value"),
        (part("model", b"studio") + part("temperature", b"-0.1") + END, "invalid_value"),
        (part("model", b"studio") + part("stream", b"2") + END, "invalid_value"),
        (part("model", b"x" * 1000) + END, "model_not_found"),
        (
            part("x" * 1000, b"x") + part("model", b"studio") + part("response_format", b"x" * 1000) + END,
            "invalid_value",
        ),
    ],
)
def test_a_form_that_cannot_be_read(body: bytes, code: str) -> None:
    assert refusal("transcription", body)["code"] == code


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "text/plain",
        "multipart/form-data",
        "multipart/mixed; boundary=XX",
        "multipart/form-data; boundary=" + "X" * 1000,
    ],
)
def test_a_body_that_is_not_a_form(kind: str) -> None:
    assert refusal("transcription", part("model", b"studio") + END, kind)["code"] in (
        "missing_required_parameter",
        "invalid_form",
    )


WORDS = b'--XX --XX-- - : ; " = \\ * % name file filename="f" Content-Disposition: form-data; name='.split(b" ")
PIECES = [*WORDS, b"\r\n", b"\r", b"\n", b"\xff", b"Content-Disposition: form-data; name=", part("a", b"b")]


@given(
    st.lists(st.sampled_from(PIECES) | st.binary(max_size=5), max_size=30).map(b"".join),
    st.sampled_from(
        [MULTIPART, "multipart/form-data; boundary=\xff", 'multipart/form-data; boundary=""', ";;=", "\x85"]
    ),
)
def test_any_form_is_parsed_or_refused(body: bytes, content_type: str) -> None:
    for path in ("transcription", "edit_form"):
        parsed_or_refused(path, b"--XX\r\n" + body, content_type)
        parsed_or_refused(path, body, content_type)


def test_engines_parameters_have_the_types_that_the_engines_declare() -> None:
    form = {"image_guidance": "1.5", "think": "true", "renorm": "global", "other": "1"}
    assert typed(form, config.load("bagel")) == {**form, "image_guidance": 1.5, "think": True}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("renorm_min", "x", "expected a number, got text"),
        ("renorm_min", "2", "expected a number <= 1.0"),
        ("image_guidance", "-1e9", "expected a number >= "),
        ("image_guidance", "1e999", "Number out of range"),
        ("max_tokens", "9" * 30, "expected an integer <= "),
        ("max_tokens", "9" * 5000, "Integer value out of range"),
        ("renorm", "5", "Invalid value '5'; accepted: 'channel', 'global', 'text_channel'"),
    ],
)
def test_an_engines_parameter_is_refused_with_the_reason(name: str, value: str, reason: str) -> None:
    with pytest.raises(HTTPError) as caught:
        typed({name: value}, config.load("bagel"))
    error = error_object(caught.value)
    assert (error["param"], error["code"]) == (name, "invalid_value")
    assert error["message"].startswith(f"{name}: {reason}")
