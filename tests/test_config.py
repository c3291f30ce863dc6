"""Pipelines that cannot work are refused before any process starts, in a sentence that says where and what would do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_actors import config
from omni_actors.config import Pipeline, Stage
from omni_actors.errors import ConfigError
from omni_actors.system import OmniSystem

GOOD = """\
name: two
stages:
  first:
    engine: echo
    accepts: [script]
  second:
    engine: echo
    inputs: [first]
    emits: audio
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "two.yaml"
    path.write_text(GOOD)
    return path


def test_a_stage_may_stand_before_those_that_feed_it(good: Path) -> None:
    head, first, second = re.split(r"(?=^  first:|^  second:)", GOOD, flags=re.MULTILINE)
    good.write_text(head + second + first)
    assert list(config.load(good).stages) == ["second", "first"]


def refused(config_: str | Path | Pipeline, overrides: dict[str, Any] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config.load(config_, overrides)
    error = caught.value
    assert str(error) == f"{error.file}: {error.path}: found {error.found!r}; accepted: {error.accepted}"
    return error


BROKEN: dict[str, tuple[str, str, int | None, str, object, str]] = {
    # case: (text, its replacement in GOOD, line, path, found, what "accepted" says)
    "unknown field": ("engine: echo\n    accepts", "enigne: echo\n    accepts", 4, "stages.first", "enigne", "engine"),
    "field missing": ("    engine: echo\n    accepts", "    accepts", 4, "stages.first", None, "a value for 'engine'"),
    "unknown engine": ("engine: echo\n    i", "engine: ehco\n    i", 7, "stages.second.engine", "ehco", "mean 'echo'"),
    "unknown source": ("[first]", "[frist]", 8, "stages.second.inputs.0", "frist", "did you mean 'first'?"),
    "a stage that is not a mapping": ("\n    engine: echo\n    a", " 5\n  x:\n    a", 3, "stages.first", 5, "object"),
    "wrong type": ("emits: audio", "emits: audio\n    replicas: two", 10, "stages.second.replicas", "two", "int"),
    "former name of a timeout": (
        *("emits: audio", "emits: audio\n    step_s: 5", 7),
        *("stages.second", "step_s", "did you mean 'step_timeout_s'?"),
    ),
    "wrong type in a list": ("[script]", "[script, 7]", 5, "stages.first.accepts[1]", 7, "str"),
    "number out of range": ("emits: audio", "emits: audio\n    threads: -1", 10, "stages.second.threads", -1, ">= 0"),
    "unknown option": ("[script]", "[script]\n    options: {stp_s: 1}", 6, "stages.first.options", "stp_s", "'step_s'"),
    "option of a wrong type": (
        *("[script]", "[script]\n    options:\n      fan_out: 0", 7),
        *("stages.first.options.fan_out", 0, ">= 1"),
    ),
    "unknown default": (
        *("[script]", "[script]\n    defaults: {temperature: 1}", 6),
        *("stages.first.defaults", "temperature", "one of"),
    ),
    "unknown field inside a section": (
        *("[script]", "[script]\n    restart:\n      intesity: 1", 7),
        *("stages.first.restart", "intesity", "did you mean 'intensity'?"),
    ),
    "cycle": ("accepts: [script]", "inputs: [second]", 3, "stages", "first -> second -> first", "no cycle"),
    "a stage that feeds itself": ("[first]", "[first, second]", 3, "stages", "second -> second", "no cycle"),
    "a source twice": ("[first]", "[first, first]", 8, "stages.second.inputs.1", "first", "once"),
    "two stages of one modality": (
        "[script]",
        "[script]\n    emits: audio",
        10,
        "stages.second.emits",
        "audio",
        "first",
    ),
    "a stage that nobody reads": ("    emits: audio\n", "", 7, "stages.second", "second", "emits"),
    "a stage that gets nothing": ("    accepts: [script]\n", "", 4, "stages.first", "first", "accepts"),
    "bad name of a stage": ("second:", "Second:", 7, "stages.Second", "Second", "name"),
    "the client's name": ("second:", "client:", 7, "stages.client", "client", "'client'"),
    "a key twice": ("    inputs", "    engine: echo\n    inputs", 8, "stages.second.engine", "engine", "once"),
    "no stages": (GOOD, "name: two\n", None, "stages", None, "stage"),
    "no name": ("name: two\n", "", None, "(document)", None, "a value for 'name'"),
    "unknown field at the top": ("name: two", "name: two\nlimit: {}", None, "(document)", "limit", "'limits'"),
    "empty": (GOOD, "", None, "(document)", None, "mapping"),
    "a list": (GOOD, "- 1\n", None, "(document)", [1], "mapping"),
    "a model that is nowhere": (
        "[script]",
        "[script]\n    model: nowhere",
        None,
        "stages.first.model",
        "nowhere",
        "nowhere",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_a_broken_pipeline_is_refused_where_it_is_broken(case: str, good: Path) -> None:
    old, new, line, place, found, accepted = BROKEN[case]
    assert GOOD.count(old) == 1
    good.write_text(GOOD.replace(old, new))  # noqa: ASYNC240
    with pytest.raises(ConfigError) as caught:
        async with OmniSystem.open(good):
            pytest.fail("it opened")
    error = caught.value
    assert (error.path, error.found) == (place, found)
    assert accepted in error.accepted
    assert error.file == (f"{good}:{line}" if line else str(good))


def test_an_engine_that_needs_a_model_and_has_none(good: Path) -> None:
    good.write_text(GOOD.replace("engine: echo\n    accepts", "engine: llm\n    accepts"))
    error = refused(good)
    assert (error.file, error.path, error.found) == (f"{good}:4", "stages.first.model", None)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("name: [unclosed", id="syntax"),
        pytest.param("a: 1\n--- \nb: 2\n", id="two documents"),
        pytest.param("name: !!python/name:os.system\n", id="a tag that is not plain YAML"),
        pytest.param("name: 2026-99-99\n", id="an impossible date"),
        pytest.param("name: x\nstages: &all {a: *all}\n", id="a mapping inside itself"),
        pytest.param("name: x\nstages: &all [*all]\n", id="a list inside itself"),
    ],
)
def test_what_is_no_yaml_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    error = refused(path)
    assert (error.file, error.path) == (str(path), "(document)")


def test_what_is_no_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("name: Präludium".encode("latin-1"))
    assert refused(path).path == "(document)"


def test_an_unknown_name_lists_the_known_ones() -> None:
    error = refused("ecco")
    assert (error.file, error.found) == ("ecco", "ecco")
    assert all(name in error.accepted for name in config.config_names())
    assert "did you mean 'echo'?" in error.accepted


@pytest.mark.parametrize("name", ["nowhere/at_all", "nowhere.yaml", "."])
def test_a_path_that_is_no_file(name: str, tmp_path: Path) -> None:
    assert "YAML file" in refused(name).accepted


@pytest.mark.parametrize(
    ("overrides", "place", "found", "accepted"),
    [
        ({"stages.frist.threads": 1}, "stages.frist", "frist", "did you mean 'first'?"),
        ({"stages.first.threds": 1}, "stages.first", "threds", "did you mean 'threads'?"),
        ({"stages.first.threads": "one"}, "stages.first.threads", "one", "int"),
        ({"stages.first.engine": "ehco"}, "stages.first.engine", "ehco", "did you mean 'echo'?"),
        ({"stages.first.accepts.0": "a"}, "stages.first.accepts", ["script"], "mapping"),
        ({"stages.second.inputs": ["frist"]}, "stages.second.inputs.0", "frist", "did you mean 'first'?"),
        ({"stages.second.emits": None}, "stages.second", "second", "emits"),
        ({"stages.first.options": {"fan_out": 0}}, "stages.first.options.fan_out", 0, ">= 1"),
        ({"stages": {}}, "stages", {}, "mapping"),
        ({"limits.max_requests": 0}, "limits.max_requests", 0, ">= 1"),
    ],
)
def test_a_bad_override_is_named_as_one(
    overrides: dict[str, Any], place: str, found: object, accepted: str, good: Path
) -> None:
    error = refused(good, overrides)
    assert (error.path, error.found) == (place, found)
    assert accepted in error.accepted
    if place not in ("stages", "stages.second", "stages.first"):  # what stands in the file, less or more than it should
        assert error.file == "overrides"


def test_a_pipeline_object_is_validated_as_a_file_is() -> None:
    stage = Stage(engine="echo", accepts=("script",), emits="text")
    pipeline = Pipeline(name="one", stages={"only": stage}, file="mine")
    assert config.load(pipeline) == pipeline
    error = refused(msgspec.structs.replace(pipeline, stages={"only": msgspec.structs.replace(stage, replicas=0)}))
    assert (error.file, error.path, error.found) == ("mine", "stages.only.replicas", 0)


def test_every_shipped_pipeline_is_valid() -> None:
    assert "voice" in config.config_names()
    for name in config.config_names():
        assert config.load(name).name == name


@pytest.mark.parametrize("name", ["qwen3_omni", "qwen2_5_omni"])
def test_an_omni_pipeline_names_its_model_once_and_its_parts_fit_together(name: str) -> None:
    pipeline = config.load(name)
    thinker, talker, _ = pipeline.stages.values()
    assert len({stage.model for stage in pipeline.stages.values()}) == 1
    longest = pipeline.options("thinker")["context"]
    assert pipeline.options("talker")["context"] >= longest + talker.defaults["talker_max_tokens"]
    row_bytes = 2 * {"qwen3_omni": 2048, "qwen2_5_omni": 3584}[name]  # bfloat16
    assert thinker.ring_bytes >= 2 * pipeline.options("thinker")["prefill_chunk"] * row_bytes, "one copy a chunk"
    assert pipeline.limits.retain_bytes > longest * row_bytes, "a talker that dies can be fed again"
    assert pipeline.limits.worker_retain_bytes > pipeline.limits.retain_bytes


def test_a_value_may_be_written_once_and_named_again(good: Path) -> None:
    text = GOOD.replace(
        "accepts: [script]", "accepts: [script]\n    model: &model m\n    restart: &restart {period_s: 9}"
    )
    good.write_text(text.replace("emits: audio", "emits: audio\n    model: *model\n    restart: *restart"))
    rows = {row.path: row for row in config.explain(good, {"stages.first.restart.period_s": 8})}
    assert (rows["stages.second.model"].value, rows["stages.second.model"].origin) == ("m", f"{good}:6")
    assert [rows[f"stages.{name}.restart.period_s"].value for name in ("first", "second")] == [8.0, 9.0]


def test_explain_says_where_each_value_comes_from(good: Path) -> None:
    good.write_text(GOOD.replace("[script]", "[script]\n    options:\n      step_s: 1.5\n      spin: true"))
    rows = {row.path: row for row in config.explain(good, {"stages.second.replicas": 2, "limits": {"max_requests": 9}})}
    assert (rows["name"].value, rows["name"].origin) == ("two", f"{good}:1")
    assert (rows["stages.first.accepts"].value, rows["stages.first.accepts"].origin) == (("script",), f"{good}:5")
    assert (rows["stages.first.options.step_s"].value, rows["stages.first.options.step_s"].origin) == (1.5, f"{good}:7")
    assert (rows["stages.first.options.fan_out"].value, rows["stages.first.options.fan_out"].origin) == (1, "default")
    assert (rows["stages.second.replicas"].value, rows["stages.second.replicas"].origin) == (2, "overrides")
    assert (rows["limits.max_requests"].value, rows["limits.max_requests"].origin) == (9, "overrides")
    assert (rows["limits.deadline_s"].value, rows["limits.deadline_s"].origin) == (600.0, "default")
    assert "file" not in rows


def test_a_mapping_that_is_overridden_whole_forgets_the_lines_of_the_old_one(good: Path) -> None:
    good.write_text(GOOD.replace("[script]", "[script]\n    options:\n      step_s: 1.5\n      spin: true"))
    rows = {row.path: row for row in config.explain(good, {"stages.first.options": {"step_s": 2}})}
    assert (rows["stages.first.options.step_s"].value, rows["stages.first.options.step_s"].origin) == (2.0, "overrides")
    assert (rows["stages.first.options.spin"].value, rows["stages.first.options.spin"].origin) == (False, "default")


def test_explain_of_an_object_names_the_object() -> None:
    pipeline = Pipeline(name="one", stages={"only": Stage(engine="echo", accepts=("a",), emits="text")}, file="mine")
    origins = {row.path: row.origin for row in config.explain(pipeline, {"stages.only.threads": 3})}
    assert origins["stages.only.engine"] == "mine"
    assert origins["stages.only.threads"] == "overrides"
    assert origins["stages.only.options.fan_out"] == "default"


def test_parse_overrides_reads_values_as_yaml() -> None:
    assert config.parse_overrides(["a.b=2", "c=[x, y]", "d=true", "e=", "f=a=b", "a.b=3"]) == {
        "a.b": 3,
        "c": ["x", "y"],
        "d": True,
        "e": None,
        "f": "a=b",
    }


@pytest.mark.parametrize("assignment", ["a", "=1", "", "a=[1", "a=2026-99-99", "a=!!python/name:os.system"])
def test_parse_overrides_refuses_what_is_no_assignment(assignment: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("overrides: ")) as caught:
        config.parse_overrides([assignment])
    assert caught.value.file == "overrides"


def test_threads_share_the_machine_unless_they_are_given(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    pipeline = config.load(good, {"stages.second.replicas": 3, "stages.first.threads": 5})
    assert (pipeline.threads("first"), pipeline.threads("second")) == (5, 2)
    assert not pipeline.spins, "5 + 3 x 2 threads are too many for 8 cores"
    assert config.load(good, {"stages.first.threads": 8, "stages.second.threads": 1}).spins, "one team"
