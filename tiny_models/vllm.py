"""The tiny omni checkpoints in sizes that vLLM takes.

On a CPU, its attention needs heads of 32 at least. In the layers that add a picture's features, vLLM's hidden states
already contain the next layer's features, so the talker reads one layer later. vLLM requires some entries of the real
configurations that transformers has defaults for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

from tiny_models import qwen2_5 as tiny25
from tiny_models import qwen3 as tiny3

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
SECTION = [8, 4, 4]


def qwen3(directory: Path, *, talker: bool = False, **options: Any) -> Path:
    """talker: whether vLLM takes the talker too. options: of ``tiny_models.qwen3.save``."""
    text_config = tiny3.text_config

    def wider(vocabulary: int, layers: int, **more: Any) -> dict[str, Any]:
        made = text_config(vocabulary, layers, **more)
        sizes = [len(tiny3.TOKENIZER), *([tiny3.CODEBOOK + tiny3.SPECIALS] if talker else ())]
        rope = {"rope_parameters": {**tiny3.MROPE, "mrope_section": SECTION}}
        return {**made, **HEADS, **rope} if vocabulary in sizes else made

    with mock.patch.object(tiny3, "text_config", wider):
        tiny3.save(directory, **options)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["talker_config"]["accept_hidden_layer"] = 3
    config["thinker_config"]["vision_config"] |= {"image_size": 128, "apply_vit_abs_pos_embed": True}
    config["thinker_config"]["text_config"]["tie_word_embeddings"] = False
    file.write_text(json.dumps(config))
    return directory


def qwen2_5(directory: Path, *, spread: float = 0.3, **options: Any) -> Path:
    """spread: of the thinker's random weights. options: of ``tiny_models.qwen2_5.save``."""
    config = tiny25.config

    def wider(**more: Any) -> Any:
        made = config(**more)
        text = made.thinker_config.text_config
        text.num_attention_heads, text.num_key_value_heads = 2, 1
        made.thinker_config.initializer_range = text.initializer_range = spread
        text.rope_parameters = {**text.rope_parameters, "mrope_section": SECTION}
        return made

    with mock.patch.object(tiny25, "config", wider):
        tiny25.save(directory, **options)
    file = directory / "config.json"
    changed = json.loads(file.read_text())
    changed["thinker_config"]["text_config"]["tie_word_embeddings"] = False
    file.write_text(json.dumps(changed))
    return directory
