"""LoRA adapters of thinkers and talkers: text, codes and sound are those of the model that PEFT makes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file, save_file

from omni_actors.errors import InvalidAdapter
from omni_actors.stages.adapters.options import Adapter
from tests.support.adapters import adapter, save_adapter, with_adapter
from tests.support.omni_questions import STORY, SYSTEM, Ask
from tests.support.qwen2_5_chain import Qwen25Chain
from tests.support.qwen3_chain import Qwen3Chain
from tiny_models import qwen2_5, qwen3

# They need the libraries of the extra. The weights are random.
pytestmark = [pytest.mark.voice, pytest.mark.usefixtures("clear_choices")]

LAYERS = r"q_proj|k_proj|v_proj|o_proj|qkv|fc1|linear_fc1"
TARGETS = rf"(thinker|talker)\..*\.({LAYERS})|talker\.thinker_to_talker_proj"
"""All kinds of linear layers but the heads, whose choices ``clear_choices`` watches."""
OTHERS = r"(code2wav|token2wav)\..*|.*patch_embed.*"
PLAIN = Ask(STORY, max_tokens=8, max_frames=10, speaker="Ethan")
ASKS = [
    Ask("hello you", speaker="Ethan"),
    Ask("what did you hear and see ?", SYSTEM, audio=(0.7,), image=((64, 64),), speaker="Ethan"),
]
"""Those that have the adapter."""


class Adapted(NamedTuple):
    chain: Any
    lora: Adapter


@pytest.fixture(scope="module", params=["qwen3", pytest.param("qwen2_5", marks=pytest.mark.slow)])
def adapted(
    request: pytest.FixtureRequest, open_stage: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Adapted]:
    """A chain whose reference has the adapter, once it has answered ``PLAIN``."""
    tiny, make = {"qwen3": (qwen3, Qwen3Chain), "qwen2_5": (qwen2_5, Qwen25Chain)}[request.param]
    directory = tiny.save(tmp_path_factory.mktemp(request.param), seed=1)
    with ExitStack() as stack:

        def open_engine(*args: Any, **options: Any) -> Any:
            return stack.enter_context(closing(open_stage(*args, **options)))

        chain = make(directory, open_engine, ({"prefill_chunk": 16, "prefix_cache_mb": 1}, {"prefill_chunk": 7}))
        chain.expected(PLAIN)
        fresh = type(chain.reference)(directory, clear=False).model
        saved = save_adapter(
            fresh,
            tmp_path_factory.mktemp("adapter") / "all",
            target_modules=TARGETS,
            exclude_modules=OTHERS,
            lora_alpha=4,
        )
        with_adapter(chain.reference.model, saved)
        yield Adapted(chain, adapter(saved))


def test_a_batch_of_adapted_and_plain_requests_is_answered_as_peft_does(adapted: Adapted) -> None:
    asks = [*ASKS, PLAIN]
    results = adapted.chain.answers(asks, loras=[adapted.lora, adapted.lora, None])
    for ask, result in zip(asks, results, strict=True):
        adapted.chain.check(ask, result)
    [plain] = adapted.chain.answers(ASKS[:1])
    assert plain.text != results[0].text, "the adapter changes the text"
    assert plain.codes.tolist() != results[0].codes.tolist()


def test_answers_are_the_same_when_the_prefix_cache_has_the_prompts(adapted: Adapted) -> None:
    chain, found = adapted.chain, []
    for _ in range(2):
        before = chain.thinker.gauges()["prefix_cache_hits"]
        for ask, result in zip(
            [ASKS[0], PLAIN], chain.answers([ASKS[0], PLAIN], loras=[adapted.lora, None]), strict=True
        ):
            chain.check(ask, result)
        found.append(chain.thinker.gauges()["prefix_cache_hits"] - before)
    assert found[1] > 16, "blocks of both"


def test_an_adapter_of_one_part_may_have_the_names_of_earlier_versions(adapted: Adapted, tmp_path: Path) -> None:
    """It is for the thinker alone, and was made by PEFT around that part."""
    tensors = load_file(Path(adapted.lora.directory) / "adapter_model.safetensors")
    text = {
        name.replace("thinker.model.language_model.", "model."): tensor
        for name, tensor in tensors.items()
        if "thinker.model.language_model." in name
    }
    assert text
    save_file(text, tmp_path / "adapter_model.safetensors")
    config = json.loads((Path(adapted.lora.directory) / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    part = adapter(tmp_path)
    thinker, talker = adapted.chain.thinker, adapted.chain.talker
    thinker._adapters.use(part, ())
    assert {path.split(".")[1] for path in thinker._adapters._loaded[part]} == {"language_model"}
    with pytest.raises(InvalidAdapter, match="no linear layer") as caught:
        talker._adapters.use(adapter(saved_again(tmp_path, "model.layers.0.mlp.nothing")), ())
    assert caught.value.misfit


def saved_again(directory: Path, module: str) -> Path:
    """Save an adapter with one update, of ``module``."""
    tensors = load_file(directory / "adapter_model.safetensors")
    pair = {suffix: next(t for name, t in tensors.items() if suffix in name) for suffix in ("lora_A", "lora_B")}
    other = directory / "other"
    other.mkdir()
    names = {f"base_model.model.{module}.{suffix}.weight": tensor for suffix, tensor in pair.items()}
    save_file(names, other / "adapter_model.safetensors")
    (other / "adapter_config.json").write_text((directory / "adapter_config.json").read_text())
    return other
