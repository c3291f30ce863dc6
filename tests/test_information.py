"""What a system tells of its pipeline. No worker runs here, except for the capabilities that few engines have."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from omni_actors.config import Pipeline, Stage
from omni_actors.errors import ConfigError, InvalidRequest, Unsupported
from omni_actors.supervisor.process import LocalSpawner
from omni_actors.system import OmniSystem
from tiny_models.llama import save_model

ONE = Pipeline(name="one", stages={"only": Stage(engine="echo", accepts=("messages",), emits="text")})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


def described(model: Path) -> OmniSystem:
    stages = {
        "ear": Stage(engine="echo", accepts=("audio",), emits="transcript"),
        "mind": Stage(engine="llm", model=str(model), accepts=("messages",), inputs=("ear",), emits="text"),
    }
    return OmniSystem(Pipeline(name="described", stages=stages), {"mind": model}, LocalSpawner())


async def test_the_tokenizer_is_that_of_the_first_stage_with_one(model: Path) -> None:
    omni = described(model)
    for tokenizer in (await omni.get_tokenizer(), await omni.get_tokenizer("mind")):
        ids = tokenizer("hello")["input_ids"]
        assert tokenizer.decode(ids) == "hello"
    with pytest.raises(Unsupported, match="ear"):
        await omni.get_tokenizer("ear")
    with pytest.raises(InvalidRequest, match="nowhere"):
        await omni.get_tokenizer("nowhere")


async def test_the_model_s_configuration_and_the_tasks(model: Path) -> None:
    omni = described(model)
    assert omni.model_config.keys() == {"mind"}
    assert omni.model_config["mind"]["hidden_size"] > 0
    assert await omni.get_supported_tasks() == ("generate", "transcription")


async def test_capabilities_that_an_engine_lacks_and_a_line_of_statistics(caplog: pytest.LogCaptureFixture) -> None:
    async with OmniSystem.open(ONE) as omni:
        for method in (omni.reset_prefix_cache, omni.reset_mm_cache, omni.reset_encoder_cache):
            (reply,) = (await method())["only"]
            assert isinstance(reply.error, Unsupported)
            assert reply.error.why.startswith("the engine ")
        (reply,) = (await omni.collective_rpc("anything", args=(1,), kwargs={"x": 2}))["only"]
        assert isinstance(reply.error, Unsupported)
        await omni.generate("hello").text()
        with caplog.at_level(logging.INFO, "omni_actors.statistics"):
            await omni.do_log_stats()
        assert "0 in flight, 0 of them waiting; 1 ended" in caplog.text
        assert "only.0 0" in caplog.text


@pytest.mark.parametrize("content", ["{", "", '{"architectures": ["é"]}'.encode("latin-1")])
def test_a_configuration_that_is_no_json_is_named(content: str | bytes, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match="the configuration of a model") as caught:
        _ = described(tmp_path).model_config
    assert caught.value.file == str(file)


@pytest.mark.parametrize(
    ("method", "given", "param"),
    [
        ("tokenize", {"messages": 3}, "messages"),
        ("tokenize", {"messages": "hello"}, "messages"),
        ("tokenize", {"prompt": "a", "tools": None}, "tools"),
        ("detokenize", {"tokens": 3}, "tokens"),
        ("encode", {"texts": 3}, "texts"),
        ("encode", {"texts": ["a", ["b", "c"]]}, "texts"),
        ("encode", {"texts": "a", "n": 2}, "n"),
    ],
)
async def test_wrong_texts_are_refused_before_anything_is_asked(
    model: Path, method: str, given: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await getattr(described(model), method)(**given)
    assert refused.value.param == param
