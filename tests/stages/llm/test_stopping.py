"""The end of an answer: end tokens, stop strings and tokens, limits, and the text that is put out until then."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from omni_actors.stages.autoregressive.options import TextParams
from omni_actors.stages.autoregressive.text import AnswerText, Vocabulary
from omni_actors.stages.llm.engine import LLMEngine
from tests.stages.llm.tiny_engine import PROMPTS, Results, answer, answered, assert_empty, opened, submit, user
from tiny_models.llama import save_tokenizer

pytestmark = pytest.mark.usefixtures("clear_choices")


@pytest.mark.parametrize("start", range(0, 12, 3))
@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_stop_string_cuts_the_text_wherever_tokens_end(engine: LLMEngine, start: int, size: int) -> None:
    full, _ = answered(engine, PROMPTS[2], 30)
    stop = full[start : start + size]
    submit(engine, 0, PROMPTS[2], max_tokens=30, stop=(stop, "never said"))
    results = Results().run(engine)
    assert results.text(0) == full[: full.index(stop)]
    assert results.ends[0]["finish_reason"] == "stop"
    assert results.ends[0]["completion_tokens"] <= 30


def test_text_held_for_a_stop_string_comes_at_the_end(engine: LLMEngine) -> None:
    full, _ = answer(engine, PROMPTS[2], max_tokens=12)
    text, end = answer(engine, PROMPTS[2], max_tokens=12, stop=(full[-3:] + "!",))
    assert text == full
    assert end["text"] == full[-3:]
    assert end["finish_reason"] == "length"


def save_chain(path: Path, script: Sequence[str]) -> None:
    """Save a model that answers any prompt with these tokens, which must be distinct: each maps to the next one."""
    size = save_tokenizer(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    last = tokenizer.apply_chat_template(user("x")["messages"], add_generation_prompt=True, return_dict=False)[-1]
    chain = [last, *tokenizer.convert_tokens_to_ids(list(script))]
    assert len(set(chain)) == len(chain)
    assert None not in chain
    width = size + size % 2
    sizes = {"vocab_size": size, "hidden_size": width, "num_attention_heads": 1, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, intermediate_size=8, max_position_embeddings=128, eos_token_id=None)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, width))
        model.lm_head.weight[chain[1:], chain[:-1]] = 1
    model.save_pretrained(path)


def byte_tokens(text: str) -> list[str]:
    """The tokens of the single bytes of a text."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return list(letters[0][0])


def test_a_character_of_several_tokens_is_put_out_whole(tmp_path: Path) -> None:
    script = byte_tokens("é🙂 你")
    assert len(script) == 10
    save_chain(tmp_path, script)
    with closing(opened(tmp_path)) as engine:
        submit(engine, 0, "x", max_tokens=10)
        results = Results().run(engine)
        assert [piece for piece in results.pieces[0] if piece] == ["é", "🙂", " ", "你"]
        assert answer(engine, "x", max_tokens=9)[0] == "é🙂 \ufffd"
        assert answer(engine, "x", max_tokens=10, stop=("🙂",))[0] == "é"
        assert answer(engine, "x", max_tokens=10, stop=("\ufffd", " 你!"))[0] == "é🙂 你"
        text, end = answer(engine, "x", max_tokens=9, stop=("\ufffd",))
        assert (text, end["finish_reason"], end["completion_tokens"]) == ("é🙂 ", "stop", 9)


def test_special_tokens_are_counted_and_not_shown(tmp_path: Path) -> None:
    save_chain(tmp_path, ["a", "<|im_start|>", "b", "<|im_end|>"])
    with closing(opened(tmp_path)) as engine:
        text, end = answer(engine, "x", max_tokens=10)
        assert (text, end["finish_reason"], end["completion_tokens"]) == ("ab", "stop", 4)


def test_ignore_eos_continues_after_the_end_token(tmp_path: Path) -> None:
    save_chain(tmp_path, ["a", "<|im_end|>", "b", "c"])
    with closing(opened(tmp_path)) as engine:
        text, end = answer(engine, "x", max_tokens=4, ignore_eos=True)
        assert (text, end["finish_reason"], end["completion_tokens"]) == ("abc", "length", 4)


def test_a_stop_token_ends_the_answer_and_is_not_shown(tmp_path: Path) -> None:
    save_chain(tmp_path, ["a", "b", "c"])
    stop = AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids("b")
    with closing(opened(tmp_path)) as engine:
        text, end = answer(engine, "x", max_tokens=3, stop_token_ids=(stop,))
        assert (text, end["finish_reason"], end["completion_tokens"]) == ("a", "stop", 2)


@pytest.mark.parametrize(("min_tokens", "count"), [(0, 1), (3, 5)])
def test_no_end_token_is_chosen_before_min_tokens(tmp_path: Path, min_tokens: int, count: int) -> None:
    """The model leaves its script with the first other token, and does not return to it."""
    save_chain(tmp_path, ["<|im_end|>"])
    with closing(opened(tmp_path)) as engine:
        _, end = answer(engine, "x", max_tokens=5, min_tokens=min_tokens)
        assert end["completion_tokens"] == count


def test_special_tokens_are_shown_on_request(tmp_path: Path) -> None:
    save_chain(tmp_path, ["a", "<|im_start|>", "b", "<|im_end|>"])
    with closing(opened(tmp_path)) as engine:
        assert answer(engine, "x", max_tokens=10, skip_special_tokens=False)[0] == "a<|im_start|>b"


def test_special_tokens_are_not_passed_to_the_decoder(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    special = tokenizer.convert_tokens_to_ids("<|im_start|>")
    decoded_tokens: list[Sequence[int]] = []
    vocabulary = Vocabulary(tokenizer, None)
    vocabulary.decode = lambda tokens, **_: decoded_tokens.append(tuple(tokens)) or "a"  # type: ignore[method-assign, func-returns-value]
    reply = AnswerText(vocabulary, 1, 1000, TextParams())
    for token in [special] * 100 + tokenizer.encode("a") + [special] * 100:
        reply.push(token)
    assert decoded_tokens == [tuple(tokenizer.encode("a"))]


def test_an_answer_that_ends_at_once_is_empty(tmp_path: Path) -> None:
    save_chain(tmp_path, ["<|im_end|>"])
    with closing(opened(tmp_path)) as engine:
        submit(engine, 0, "x", max_tokens=10)
        results = Results().run(engine)
        assert results.pieces[0] == [""]
        assert (results.ends[0]["finish_reason"], results.ends[0]["completion_tokens"]) == ("stop", 1)
        assert_empty(engine)
