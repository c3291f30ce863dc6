"""Which checkpoints and options the llm engine opens."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_actors.stages.llm.engine import open_engine
from tests.stages.llm.tiny_engine import PROMPTS, answer, decoded, opened, reference
from tests.support.clear_choices import patched_choices
from tests.support.stage_context import stage_context
from tiny_models.llama import save_model, save_tokenizer

pytestmark = pytest.mark.usefixtures("clear_choices")


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({}, {"context": 129}, "found 129; the model has 128"),
        ({}, {"dtype": "int8"}, "'int8'"),
        ({}, {"dtype": "nonsense"}, "'nonsense'"),
        ({"sliding_window": 50}, {}, "window 50"),
        ({"rope_parameters": LONGROPE}, {"context": 33}, "found 33; this model has at most 32"),
        ({"layer_types": ["full_attention", "linear_attention"]}, {}, "linear_attention"),
    ],
)
def test_a_model_or_option_that_would_give_wrong_results_is_refused(
    tmp_path: Path, config: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    save_model(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, **options)


def test_a_checkpoint_needs_a_chat_template(tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        opened(tmp_path)


def test_a_chat_template_that_is_not_jinja_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}\n{{ m.content }")
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}: line 2 of the chat template is not Jinja: "):
        opened(tmp_path)


def test_the_tokenizer_may_be_in_another_directory(tmp_path: Path) -> None:
    model, words = save_model(tmp_path / "model"), tmp_path / "words"
    with closing(opened(model)) as engine:
        expected = answer(engine, PROMPTS[0], max_tokens=5)
    save_tokenizer(words)
    for file in words.iterdir():
        (model / file.name).unlink()
    context = msgspec.structs.replace(stage_context({"context": 128}, model=model), tokenizer=words)
    with closing(open_engine(context)) as engine:
        assert answer(engine, PROMPTS[0], max_tokens=5) == expected


def test_a_missing_model_is_refused() -> None:
    with pytest.raises(ValueError, match="'thinker': this engine needs a model"):
        opened(None)


def test_a_model_of_another_structure_and_dtype_works_too(tmp_path: Path) -> None:
    """Tied embeddings, biases, one key-value head and bfloat16, which Llama models do not have."""
    save_model(tmp_path, num_key_value_heads=1, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    _, after = reference(tmp_path, PROMPTS[0], 20)
    with closing(opened(tmp_path)) as engine:
        assert answer(engine, PROMPTS[0], max_tokens=20)[0] == decoded(tmp_path, after)
    with closing(opened(tmp_path, dtype="bfloat16")) as engine, patched_choices(strict=False):  # its logits do tie
        assert answer(engine, PROMPTS[0], max_tokens=20)[1]["completion_tokens"] == 20
