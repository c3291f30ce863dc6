"""``memory.count`` equals what a loaded module has, and reads headers only."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omni_actors.stages import memory
from omni_actors.stages.memory import Memory, Uncounted
from omni_actors.stages.registry import ENGINES

COUNTED = {name for name, spec in ENGINES.items() if spec.checkpoint_part is not None}
PARTS = {name: ENGINES[name].checkpoint_part for name in COUNTED if not ENGINES[name].checkpoint_folder}
"""Of a checkpoint of transformers. ``qwen_image/test_parts.py`` has those of diffusers."""
UNCOUNTED = {"diffusers", "bagel", "bagel_context", "bagel_denoiser"}
"""Their checkpoints have other files."""

voice = pytest.mark.voice  # the extra's libraries; the weights are random

CONFIG = {
    "thinker_config": {"text_config": {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32}},
    "talker_config": {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_size": 32,
    },
}


def write_weights(file: Path, **tensors: tuple[str, list[int], int]) -> None:
    """Write a safetensors file that ends after its header. tensors: name with "__" for "." -> dtype, shape, bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name.replace("__", ".")] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    data = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(data)) + data)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint in two shards: the thinker and some of the talker, and the rest of the talker."""
    write_weights(
        tmp_path / "1.safetensors",
        thinker__a=("BF16", [10, 10], 200),
        thinker__scalar=("F32", [], 4),
        talker__a=("F32", [5], 20),
    )
    write_weights(
        tmp_path / "2.safetensors",
        talker__b=("F16", [2, 3], 12),
        talker__places=("I64", [4], 32),
        talkers__no=("F32", [1000], 4000),
    )
    shards = {1: ["thinker.a", "thinker.scalar", "talker.a"], 2: ["talker.b", "talker.places", "talkers.no"]}
    placed = {name: f"{number}.safetensors" for number, names in shards.items() for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_part_is_counted_over_its_shards_in_the_loaded_dtype(checkpoint: Path) -> None:
    options = {"dtype": "bfloat16", "max_batch": 2, "context": 10}
    heads, size = 4, 32 // 4
    assert memory.count("qwen3_thinker", checkpoint, options) == Memory(101 * 2, 20 * 2 * 3 * heads * size * 2)
    heads, size = 2, 16
    assert memory.count("qwen2_5_talker", checkpoint, options) == Memory(11 * 2 + 32, 20 * 2 * 3 * heads * size * 2)
    assert memory.count("qwen3_talker", checkpoint, {"dtype": "float32"}) == Memory(11 * 4 + 32, None)
    assert memory.count("llm", checkpoint, {"dtype": "float32"}).weights == (101 + 11 + 1000) * 4 + 32


def test_only_the_shards_of_the_part_must_be_present(checkpoint: Path) -> None:
    (checkpoint / "2.safetensors").unlink()
    assert memory.count("qwen3_thinker", checkpoint, {}).weights == 101 * 4
    with pytest.raises(Uncounted, match=r"there is no 2\.safetensors") as caught:
        memory.count("qwen3_talker", checkpoint, {})
    assert caught.value.directory == checkpoint


def cut(file: Path, to: int) -> None:
    file.write_bytes(file.read_bytes()[:to])


BROKEN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    # case: (the damage to the checkpoint, engine, a part of the expected reason)
    "no weight files": (
        lambda at: (at / "model.safetensors.index.json").unlink(),
        "qwen3_thinker",
        "neither model.safe",
    ),
    "no weights of the part": (lambda at: None, "qwen3_code2wav", "no weights of the part 'code2wav'"),
    "an engine outside the registry": (lambda at: None, "package.module:Engine", "'package.module:Engine' loads"),
    "no configuration": (lambda at: (at / "config.json").unlink(), "qwen3_talker", "there is no config.json"),
    "no configuration of the part": (
        lambda at: (at / "config.json").write_text("{}"),
        "qwen3_talker",
        "config.json: Expected",
    ),
    "a configuration without end": (
        lambda at: (at / "config.json").write_text('{"a": ' + "[" * 5000),
        "qwen3_talker",
        "config.json: maximum recursion depth",
    ),
    "a configuration that is no text": (
        lambda at: (at / "config.json").write_bytes(b'{"gr\xfcn": 1}'),
        "qwen3_talker",
        "config.json: 'utf-8' codec",
    ),
    "a broken index": (lambda at: (at / "model.safetensors.index.json").write_text("{"), "qwen3_talker", "index.json"),
    "an empty shard": (lambda at: cut(at / "1.safetensors", 0), "qwen3_talker", "1.safetensors: "),
    "a header cut off": (lambda at: cut(at / "1.safetensors", 100), "qwen3_talker", "1.safetensors: "),
    "no safetensors": (
        lambda at: (at / "1.safetensors").write_bytes(b"PK\3\4" * 100),
        "qwen3_talker",
        "1.safetensors: this is not a safetensors file",
    ),
    "a tensor without shape": (
        lambda at: (at / "1.safetensors").write_bytes(struct.pack("<Q", 20) + b'{"talker.a":"F32"}  '),
        "qwen3_talker",
        "1.safetensors: Expected",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_missing_figure_is_an_error_not_a_guess(case: str, checkpoint: Path) -> None:
    damage, engine, expected = BROKEN[case]
    damage(checkpoint)
    with pytest.raises(Uncounted) as caught:
        memory.count(engine, checkpoint, {"max_batch": 1, "context": 1})
    assert expected in caught.value.reason


def test_every_engine_that_loads_a_transformers_checkpoint_can_be_counted() -> None:
    assert {name for name, spec in ENGINES.items() if "transformers" in spec.libraries} - UNCOUNTED == COUNTED


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """Complete models with random weights and their directories; one is saved in many shards."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tiny_models import qwen2_5 as tiny_2_5
    from tiny_models import qwen3 as tiny

    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True))
    saved = {}
    for name, model, shard in (
        ("qwen3", tiny.build(), "200KB"),
        ("qwen2_5", tiny_2_5.build(), "1GB"),
        ("llm", llama, "1GB"),
    ):
        directory = tmp_path_factory.mktemp(name)
        model.save_pretrained(directory, max_shard_size=shard)
        saved[name] = (model, directory)
    return saved


@voice
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", sorted(PARTS))
def test_the_counted_weights_are_those_of_the_loaded_module(
    engine: str, dtype: str, models: dict[str, tuple[Any, Path]]
) -> None:
    import torch

    part = PARTS[engine]
    whole, directory = models[engine.removesuffix(f"_{part}") if part else engine]
    item_bytes = getattr(torch, dtype).itemsize
    held = sum(parameter.numel() * item_bytes for parameter in whole.get_submodule(part).parameters())
    assert memory.count(engine, directory, {"dtype": dtype}).weights == held


@voice
@pytest.mark.parametrize("engine", ["llm", "qwen3_thinker", "qwen3_talker", "qwen2_5_thinker", "qwen2_5_talker"])
def test_the_counted_cache_is_what_a_forward_fills(engine: str, models: dict[str, tuple[Any, Path]]) -> None:
    import torch

    part = PARTS[engine]
    whole, directory = models[engine.removesuffix(f"_{part}") if part else engine]
    decoder = whole.get_submodule(f"{part}.model".lstrip("."))
    requests, tokens = 2, 24
    with torch.no_grad():
        embeddings = torch.zeros(requests, tokens, decoder.config.get_text_config().hidden_size)
        layers = decoder(inputs_embeds=embeddings, use_cache=True).past_key_values.layers
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    assert memory.count(engine, directory, {"max_batch": requests, "context": tokens}).cache == held
