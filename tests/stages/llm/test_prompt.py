"""The prompt of the llm engine: its length, its conversation with transcripts, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from omni_actors.stages.autoregressive.text import Vocabulary
from omni_actors.stages.base import CLIENT, Chunk, InvalidRequest, StageRequest
from omni_actors.stages.llm.engine import LLMEngine
from omni_actors.stages.llm.prompt import Prompt
from tests.stages.llm.tiny_engine import CONTEXT, Results, answer, assert_empty, decoded, opened, reference, user
from tiny_models.llama import save_model

pytestmark = pytest.mark.usefixtures("clear_choices")


def test_max_tokens_is_limited_to_the_rest_of_the_context(tiny: Path, engine: LLMEngine) -> None:
    text, end = answer(engine, "hello", max_tokens=1000)
    assert end["prompt_tokens"] + end["completion_tokens"] == CONTEXT
    assert end["finish_reason"] == "length"
    _, after = reference(tiny, "hello", end["completion_tokens"])
    assert text == decoded(tiny, after)


def test_a_prompt_may_fill_the_context_except_for_one_token(tiny: Path) -> None:
    size = len(reference(tiny, "hello", 1)[0])
    with closing(opened(tiny, context=size + 1)) as engine:
        assert answer(engine, "hello")[1]["completion_tokens"] == 1
        engine.start(StageRequest(1, (CLIENT,), {}))
        with pytest.raises(InvalidRequest) as refusal:
            engine.feed(1, Chunk(source=CLIENT, seq=0, last=True, tensors={}, data=user("hello!")))
        assert refusal.value.param == "messages"
        assert refusal.value.code == "context_length_exceeded"
        assert f"prompt has {size + 1} tokens" in refusal.value.message
        assert f"holds {size + 1}" in refusal.value.message
        assert_empty(engine)


def refused(engine: LLMEngine, messages: Sequence[Any]) -> str:
    engine.start(StageRequest(1, (CLIENT,), {}))
    with pytest.raises(InvalidRequest) as refusal:
        engine.feed(1, Chunk(source=CLIENT, seq=0, last=True, tensors={}, data={"messages": messages}))
    assert (refusal.value.param, refusal.value.code) == ("messages", "context_length_exceeded")
    assert_empty(engine)
    return refusal.value.message


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = len("<|im_start|>")
    frame = len("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n")
    room = longest * (CONTEXT - 1) - frame
    fits = {"role": "user", "content": "a" * room}
    assert re.search(r"prompt has \d+ tokens and", refused(engine, [fits])), "it was tokenized"
    tokenizer = AutoTokenizer.from_pretrained(engine._vocabulary.tokenizer.name_or_path)
    monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    monkeypatch.setattr(engine._vocabulary, "tokenizer", tokenizer)
    message = refused(engine, [{"role": "user", "content": "a" * (room + 1)}])
    assert f"{longest * (CONTEXT - 1) + 1} characters, which are at least {CONTEXT} tokens" in message
    assert f"holds {CONTEXT}" in message


def test_the_longest_prompt_that_fits_is_not_refused(tiny: Path) -> None:
    """The prompt consists of the longest token, apart from the template."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_tokens(["wonderfulness"])
    vocabulary = Vocabulary(tokenizer, None)
    assert vocabulary.longest == len("wonderfulness")
    frame = len(tokenizer.encode("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"))
    prompt = Prompt((CLIENT,))
    prompt.feed(Chunk(source=CLIENT, seq=0, last=True, tensors={}, data=user("wonderfulness" * 500)))
    assert len(prompt.encode(vocabulary, "", 500 + frame + 1)) == 500 + frame


def test_more_messages_than_tokens_are_refused_before_they_are_rendered(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._vocabulary, "tokenizer", None)
    message = refused(engine, [{"role": "user", "content": ""}] * CONTEXT)
    assert f"prompt has {CONTEXT} messages" in message
    assert f"holds {CONTEXT}" in message


# the prompt


def rendered_prompt(
    engine: LLMEngine, content: Any, chunks: Sequence[dict[str, Any]], messages: Sequence[Any] = ()
) -> str:
    """Return the prompt's text for a conversation with audio and the chunks of its transcripts."""
    engine.start(StageRequest(0, (CLIENT, "ear"), {"max_tokens": 1}))
    data = {"messages": [*messages, {"role": "user", "content": content}]}
    engine.feed(0, Chunk(source=CLIENT, seq=0, last=True, tensors={}, data=data))
    for number, chunk in enumerate(chunks):
        assert not engine.busy
        engine.feed(0, Chunk(source="ear", seq=number, last=number == len(chunks) - 1, tensors={}, data=chunk))
    prompt = str(engine._vocabulary.tokenizer.decode(engine._scheduler._waiting[0].uncomputed))
    engine.abort(0)
    return prompt


def test_transcripts_replace_audio_parts(engine: LLMEngine) -> None:
    content = [{"type": "audio", "index": 1}, {"type": "text", "text": "and"}, {"type": "audio", "index": 0}]
    chunks = [{"text": " the", "index": 0}, {"text": " sea", "index": 1}, {"text": " fox ", "index": 0}, {}]
    assert rendered_prompt(engine, content, chunks) == (
        "<|im_start|>user\nsea\nand\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    )


def test_decoding_begins_when_every_source_has_ended_in_any_order(engine: LLMEngine) -> None:
    engine.start(StageRequest(0, (CLIENT, "ear"), {"max_tokens": 5}))
    engine.feed(0, Chunk(source="ear", seq=0, last=True, tensors={}, data={"text": "hello", "index": 0}))
    assert not engine.busy
    audio = {"messages": [{"role": "user", "content": [{"type": "audio", "index": 0}]}]}
    engine.feed(0, Chunk(source=CLIENT, seq=0, last=True, tensors={}, data=audio))
    assert engine.busy
    results = Results().run(engine)
    assert (results.text(0), results.ends[0]) == answer(engine, "hello", max_tokens=5)


def test_the_system_prompt_is_used_for_conversations_without_one(tiny: Path) -> None:
    with closing(opened(tiny, system_prompt="be brief")) as engine:
        text = rendered_prompt(engine, "hi", [{"text": ""}])
        assert text == "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        text = rendered_prompt(engine, "hi", [{"text": ""}], [{"role": "system", "content": "rhyme"}])
        assert text == "<|im_start|>system\nrhyme<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user", "content": " \n"}], "messages"),
        ([{"role": "system", "content": "be brief"}, {"role": "user", "content": []}], "messages"),
        ([{"role": "user", "content": [{"type": "audio", "index": 0}]}], "messages"),
        ("hello", "messages"),
        ([{"role": "ghost", "content": "hello"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "video", "index": 0}]}], "messages"),
        ([{"role": "user", "content": [{"type": "smell"}]}], "messages[0].content[0].type"),
        ([{"role": "user"}], "messages[0]"),
    ],
)
def test_an_invalid_prompt_is_refused(engine: LLMEngine, messages: Any, param: str) -> None:
    engine.start(StageRequest(0, (CLIENT,), {}))
    with pytest.raises(InvalidRequest) as refusal:
        engine.feed(0, Chunk(source=CLIENT, seq=0, last=True, tensors={}, data={"messages": messages}))
    assert refusal.value.param == param
    assert_empty(engine)


def test_an_empty_transcript_is_an_empty_prompt(engine: LLMEngine) -> None:
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        rendered_prompt(engine, [{"type": "audio", "index": 0}], [{"text": " ", "index": 0}])


def test_a_conversation_may_have_messages_of_the_system_alone(engine: LLMEngine) -> None:
    engine.start(StageRequest(0, (CLIENT,), {"max_tokens": 1}))
    data = {"messages": [{"role": "system", "content": "Greet the user."}]}
    engine.feed(0, Chunk(source=CLIENT, seq=0, last=True, tensors={}, data=data))
    prompt = str(engine._vocabulary.tokenizer.decode(engine._scheduler._waiting[0].uncomputed))
    engine.abort(0)
    assert "Greet the user." in prompt
    assert "user\n" not in prompt.replace("Greet the user.", "")


def test_a_chat_template_gets_the_names_of_participants(tmp_path: Path) -> None:
    save_model(tmp_path)
    named = "{{ m.role }}{% if m.name is defined %} {{ m.name }}{% endif %}: {{ m.content }}\n"
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}" + named + "{% endfor %}")
    messages = [{"role": "user", "name": "Ann", "content": "hello"}, {"role": "user", "content": "hello"}]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    with closing(opened(tmp_path)) as engine:
        tokens = engine.call("tokenize", {"messages": messages})["tokens"]
        assert tokens == tokenizer.apply_chat_template(messages, return_dict=False)
        beside_tools = tokenizer.decode(engine.call("tokenize", {"messages": messages, "tools": tools})["tokens"])
        assert beside_tools.endswith("user Ann: hello\nuser: hello\n"), "this template does not know tools"


def test_a_conversation_that_the_chat_template_refuses_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with closing(opened(tmp_path)) as engine:
        engine.start(StageRequest(0, (CLIENT,), {}))
        with pytest.raises(InvalidRequest, match="roles must alternate") as refusal:
            engine.feed(0, Chunk(source=CLIENT, seq=0, last=True, tensors={}, data=user("hello")))
        assert refusal.value.param == "messages"
        assert_empty(engine)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": "a"}, "stop"),
        ({"stop": ["a", "b" * 257]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"voice": "low"}, "voice"),
    ],
)
def test_parameters_are_validated_in_start(engine: LLMEngine, params: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        engine.start(StageRequest(0, (CLIENT,), params))
    assert refusal.value.param == param
    assert_empty(engine)
