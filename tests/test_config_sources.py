"""What a pipeline's name may be: a shipped pipeline, a file that extends another source, or a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from omni_actors import OmniSystem, config
from omni_actors.cli import main
from omni_actors.config import models
from omni_actors.errors import ConfigError
from tests.support.echo_systems import read
from tiny_models.llama import save_model, save_tokenizer

BASE = """\
name: two
stages:
  first:
    engine: echo
    accepts: [script]
    options: {fan_out: 3}
    restart: {intensity: 5}
  second:
    engine: echo
    inputs: [first]
    emits: audio
"""


def refused(config_: str | Path, **overrides: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config.load(config_, overrides)
    return caught.value


# extends


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "two.yaml"
    path.write_text(BASE)
    return path


def extending(base: Path, text: str, name: str = "mine.yaml") -> Path:
    path = base.with_name(name)
    path.write_text(text)
    return path


def test_a_file_changes_only_what_it_names(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = extending(base, "extends: two.yaml\nstages:\n  first:\n    threads: 2\n    restart: {period_s: 9}\n")
    monkeypatch.chdir("/")  # a path is relative to the file
    pipeline = config.load(mine)
    assert (pipeline.name, pipeline.file, list(pipeline.stages)) == ("two", str(mine), ["first", "second"])
    first = pipeline.stages["first"]
    assert (first.threads, first.options, first.restart.intensity, first.restart.period_s) == (2, {"fan_out": 3}, 5, 9)
    rows = {row.path: row.origin for row in config.explain(mine)}
    assert (rows["stages.first.threads"], rows["stages.first.restart.period_s"]) == (f"{mine}:4", f"{mine}:5")
    assert (rows["stages.first.restart.intensity"], rows["stages.second.emits"]) == (f"{base}:7", f"{base}:11")


def test_a_list_is_replaced_a_null_stage_is_removed_and_a_new_stage_comes_last(base: Path) -> None:
    third = "{engine: echo, inputs: [first], emits: audio}"
    text = f"stages: {{second: null, first: {{accepts: [text]}}, third: {third}}}"
    pipeline = config.load(extending(base, f"extends: two.yaml\n{text}"))
    assert list(pipeline.stages) == ["first", "third"]
    assert pipeline.stages["first"].accepts == ("text",)


def test_another_engine_keeps_no_options(base: Path) -> None:
    engine = "tests.support.served_engines:Ear"
    mine = extending(base, f'extends: two.yaml\nstages: {{first: {{engine: "{engine}"}}}}')
    assert config.load(mine).stages["first"].options == {}
    overridden = config.load(base, {"stages.first.options.any": 1, "stages.first.engine": engine})
    assert overridden.stages["first"].options == {"any": 1}, "whatever the order of the overrides"
    assert config.load(base, {"stages.first.engine": "echo"}).stages["first"].options == {"fan_out": 3}


def test_a_file_extends_a_shipped_pipeline_and_replaces_its_model(base: Path) -> None:
    text = "extends: qwen2_5_omni\nname: mine\nmodel: /data/qwen\nstages: {talker: {model: /data/talker}}"
    mine = extending(base, text)
    stages = config.load(mine).stages
    assert [stage.model for stage in stages.values()] == ["/data/qwen", "/data/talker", "/data/qwen"]
    rows = {row.path: row.origin for row in config.explain(mine)}
    assert (rows["stages.thinker.model"], rows["name"]) == (f"{mine}:3", f"{mine}:2")


def test_an_error_in_a_value_of_the_extended_file_names_that_file(base: Path) -> None:
    base.write_text(BASE.replace("fan_out: 3", "fan_out: 0"))
    mine = extending(base, "extends: two.yaml\nstages: {second: {threads: 1}}")
    assert refused(mine).file == f"{base}:6"
    extending(base, "extends: two.yaml\nstages: {first: {options: {fan_out: 0}}}")
    assert refused(mine).file == f"{mine}:2"


@pytest.mark.parametrize(
    ("text", "found", "accepted"),
    [
        ("extends: mine.yaml", "mine.yaml", "a file that does not extend itself: mine.yaml -> mine.yaml"),
        ("extends: none.yaml", "none.yaml", "a YAML file that exists"),
        ("extends: ecco", "ecco", "did you mean 'echo'?"),
        ("extends: [a]", ["a"], "the name of a pipeline or a model"),
        ("extends: nobody/nothing", "nobody/nothing", "run: hf download nobody/nothing"),
    ],
)
def test_a_source_that_cannot_be_extended_is_refused_at_its_line(
    base: Path, text: str, found: object, accepted: str
) -> None:
    mine = extending(base, f"name: mine\n{text}\n")
    error = refused(mine)
    assert (error.file, error.path, error.found) == (f"{mine}:2", "extends", found)
    assert accepted in error.accepted


def test_a_cycle_over_two_files_is_refused(base: Path) -> None:
    extending(base, "extends: b.yaml", "a.yaml")
    error = refused(extending(base, "extends: a.yaml", "b.yaml"))
    assert "b.yaml -> a.yaml -> b.yaml" in error.accepted


def test_the_number_of_files_that_extend_one_another_is_bounded(base: Path) -> None:
    last = base
    for number in range(8):
        assert config.load(last).name == "two"
        last = extending(base, f"extends: {last.name}", f"{number}.yaml")
    assert refused(last).accepted == "at most 8 files that extend one another"


# models


def model(folder: Path, name: str = "model", **values: Any) -> Path:
    directory = folder / name
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(values))
    return directory


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda present: monkeypatch.setattr(models, "cuda_devices", lambda: present)


@pytest.mark.parametrize(
    ("architecture", "stages"),
    [
        ("Qwen3OmniMoeForConditionalGeneration", ["thinker", "talker", "code2wav"]),
        ("Qwen2_5OmniModel", ["thinker", "talker", "token2wav"]),
        ("Qwen2_5OmniForConditionalGeneration", ["thinker", "talker", "token2wav"]),
        ("LlamaForCausalLM", ["llm"]),
    ],
)
def test_the_architecture_decides_about_the_pipeline(
    architecture: str, stages: list[str], tmp_path: Path, devices: Any
) -> None:
    directory = model(tmp_path, architectures=[architecture])
    for present, expected in ((0, {"cpu"}), (1, {"cuda:0"}), (2, {"cuda:0", "cuda:1"})):
        devices(present)
        pipeline = config.load(directory)
        assert (pipeline.name, list(pipeline.stages)) == ("model", stages)
        assert {stage.model for stage in pipeline.stages.values()} == {str(directory)}
        assert {stage.device for stage in pipeline.stages.values()} <= expected
        dtype = "float32" if present == 0 else "bfloat16"
        assert pipeline.options(stages[0])["dtype"] == dtype
    assert config.load(directory, {"stages.talker.device": "cpu"} if "talker" in stages else {})


def test_a_checkpoint_without_speech_has_the_thinker_alone(tmp_path: Path) -> None:
    named = {"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "enable_audio_output": False}
    assert list(config.load(model(tmp_path, **named)).stages) == ["thinker"]


def test_a_whisper_model_is_recognized_in_the_format_that_its_engine_reads(tmp_path: Path) -> None:
    directory = model(tmp_path, architectures=["WhisperForConditionalGeneration"])
    error = refused(directory)
    assert f"ct2-transformers-converter --model {directory} --output_dir {directory}-ct2" in error.accepted
    converted = model(tmp_path, "converted", alignment_heads=[])
    (converted / "model.bin").touch()
    assert config.load(converted).stages["whisper"].emits == "transcript"


@pytest.mark.voice
def test_a_built_in_model_has_a_pipeline() -> None:
    assert config.load("whisper-tiny.en").stages["whisper"].model == "whisper-tiny.en"


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    directory = model(tmp_path, architectures=["BertModel"])
    error = refused(directory)
    assert (error.file, error.path, error.found) == (str(directory / "config.json"), "architectures", "BertModel")
    assert all(name in error.accepted for name in ("Qwen3OmniMoe", "Qwen2_5Omni", "Whisper", "ForCausalLM"))


@pytest.mark.parametrize(
    "text", ["", "[]", '{"architectures": 1}', '{"architectures": ["gr\xfcn"]}', '{"a": ' + "[" * 5000]
)
def test_a_config_that_cannot_be_read_is_refused(text: str, tmp_path: Path) -> None:
    directory = model(tmp_path)
    (directory / "config.json").write_text(text, encoding="latin-1")
    assert refused(directory).file == str(directory / "config.json")


@pytest.mark.parametrize(
    ("class_name", "stages", "accepts"),
    [
        ("QwenImagePipeline", ["text_encoder", "image_encoder", "denoiser", "vae"], ("messages",)),
        ("QwenImageEditPlusPipeline", ["text_encoder", "image_encoder", "denoiser", "vae"], ("image", "messages")),
        ("FluxPipeline", ["diffusers"], ("messages",)),
    ],
)
def test_the_class_of_diffusers_decides_about_the_pipeline(
    class_name: str, stages: list[str], accepts: tuple[str, ...], tmp_path: Path, devices: Any
) -> None:
    devices(0)
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": class_name, "vae": ["diffusers", "VAE"]}))
    pipeline = config.load(tmp_path)
    assert (pipeline.name, list(pipeline.stages)) == (tmp_path.name, stages)
    assert {(stage.model, stage.device) for stage in pipeline.stages.values()} == {(str(tmp_path), "cpu")}
    assert set(accepts) <= set(pipeline.stages[stages[0]].accepts)
    assert pipeline.stages[stages[-1]].emits == "image"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"_class_name": 1}', '{"_class_name": "gr\xfcn"}', '{"a": ' + "[" * 5000]
)
def test_an_index_that_cannot_be_read_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(text, encoding="latin-1")
    assert refused(tmp_path).file == str(tmp_path / "model_index.json")


def test_a_model_of_the_hub_is_found_in_the_local_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub.HfApi, "snapshot_download", lambda *_, **__: pytest.fail("network"))
    error = refused("someone/tiny-lm")
    assert (error.file, error.found) == ("someone/tiny-lm", "someone/tiny-lm")
    assert "run: hf download someone/tiny-lm" in error.accepted
    commit = "0" * 40
    snapshots = tmp_path / "models--someone--tiny-lm" / "snapshots"
    snapshots.mkdir(parents=True)
    model(snapshots, commit, architectures=["LlamaForCausalLM"])
    (snapshots.parent / "refs").mkdir()
    (snapshots.parent / "refs" / "main").write_text(commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    pipeline = config.load("someone/tiny-lm")
    assert (pipeline.name, pipeline.stages["llm"].model) == ("someone/tiny-lm", "someone/tiny-lm")


def test_visible_devices_are_counted_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [path / f"nvidia{number}" for number in range(4)])
    for visible, count in (("0,1", 2), ("", 0), ("-1", 0), ("0,1,2,3,4,5", 4)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert models.cuda_devices() == count
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert models.cuda_devices() == 4


def test_explain_takes_a_model(tmp_path: Path) -> None:
    directory = model(tmp_path, architectures=["LlamaForCausalLM"], max_position_embeddings=128)
    result = CliRunner().invoke(main, ["config", "explain", str(directory), "--json"])
    rows = {row["path"]: (row["value"], row["origin"]) for row in json.loads(result.stdout)}
    assert rows["stages.llm.options.context"] == (128, str(directory / "config.json"))
    assert rows["name"] == ("model", str(directory / "config.json"))


# model and tokenizer for all stages


def test_the_model_of_all_stages_is_replaced_where_they_have_one_model() -> None:
    pipeline = config.load("qwen2_5_omni", {"stages.talker.model": "other", "model": "mine"})
    assert [stage.model for stage in pipeline.stages.values()] == ["mine", "other", "mine"]
    error = refused("voice", model="mine")
    assert (error.file, error.path) == ("overrides", "model")
    assert error.accepted.endswith("name the stage: stages.whisper.model")
    assert "one model" in refused("echo", model="mine").accepted


def test_a_tokenizer_goes_to_the_stages_that_have_one() -> None:
    stages = config.load("qwen2_5_omni", {"tokenizer": "words"}).stages
    assert [stage.tokenizer for stage in stages.values()] == ["words", None, None]
    assert "a tokenizer" in refused("echo", tokenizer="words").accepted
    assert refused("qwen2_5_omni", **{"stages.talker.tokenizer": "words"}).path == "stages.talker.tokenizer"


async def test_a_tokenizer_that_is_missing_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    directory = str(model(tmp_path, architectures=["LlamaForCausalLM"]))
    with pytest.raises(ConfigError, match="no such directory") as caught:
        async with OmniSystem.open(directory, tokenizer=str(tmp_path / "none")):
            pytest.fail("it opened")
    assert caught.value.path == "stages.llm.tokenizer"


@pytest.mark.slow
async def test_a_model_answers_by_its_directory_with_another_tokenizer(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "lm")
    moved = tmp_path / "words"
    save_tokenizer(moved)
    for file in moved.iterdir():
        (directory / file.name).unlink()
    async with OmniSystem.open(str(directory), tokenizer=str(moved)) as omni:
        outputs = await read(omni.generate("the sea", max_tokens=4))
    assert outputs[-1].metrics is not None
    assert omni.pipeline.name == "lm"
