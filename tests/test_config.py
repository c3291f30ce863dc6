"""A pipeline that cannot work is refused before any process starts; the error names the place and what is accepted."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_actors import config
from omni_actors.config import Pipeline, Stage
from omni_actors.config.document import OPEN_PARAMETERS
from omni_actors.errors import ConfigError
from omni_actors.system import OmniSystem
from tests.support.two_stages import GOOD

RESTART = "stages.first.restart"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "two.yaml"
    path.write_text(GOOD)
    return path


def test_a_stage_may_precede_its_upstream_stages(good: Path) -> None:
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
    # case: (text, its replacement in GOOD, line, path, found, part of "accepted")
    "unknown field": (
        "engine: echo\n    accepts",
        "enigne: echo\n    accepts",
        4,
        "stages.first.enigne",
        "echo",
        "engine",
    ),
    "field missing": (
        "    engine: echo\n    accepts",
        "    accepts",
        4,
        "stages.first.engine",
        None,
        "a value for 'engine'",
    ),
    "unknown engine": ("engine: echo\n    i", "engine: ehco\n    i", 7, "stages.second.engine", "ehco", "mean 'echo'"),
    "unknown source": ("[first]", "[frist]", 8, "stages.second.inputs.0", "frist", "did you mean 'first'?"),
    "a stage that is not a mapping": (
        "\n    engine: echo\n    a",
        " 5\n  x:\n    a",
        3,
        "stages.first",
        5,
        "a mapping",
    ),
    "wrong type": (
        "emits: audio",
        "emits: audio\n    replicas: two",
        10,
        "stages.second.replicas",
        "two",
        "an integer",
    ),
    "former name of a timeout": (
        *("emits: audio", "emits: audio\n    step_s: 5", 10),
        *("stages.second.step_s", 5, "did you mean 'step_timeout_s'?"),
    ),
    "wrong type in a list": ("[script]", "[script, 7]", 5, "stages.first.accepts[1]", 7, "text"),
    "number out of range": ("emits: audio", "emits: audio\n    threads: -1", 10, "stages.second.threads", -1, ">= 0"),
    "unknown option": (
        "[script]",
        "[script]\n    options: {stp_s: 1}",
        6,
        "stages.first.options.stp_s",
        1,
        "'step_s'",
    ),
    "option of a wrong type": (
        *("[script]", "[script]\n    options:\n      fan_out: 0", 7),
        *("stages.first.options.fan_out", 0, ">= 1"),
    ),
    "unknown default": (
        *("[script]", "[script]\n    defaults: {temperature: 1}", 6),
        *("stages.first.defaults.temperature", 1, "one of"),
    ),
    "unknown field inside a section": (
        *("[script]", "[script]\n    restart:\n      intesity: 1", 7),
        *("stages.first.restart.intesity", 1, "did you mean 'intensity'?"),
    ),
    "cycle": ("accepts: [script]", "inputs: [second]", 3, "stages", "first -> second -> first", "no cycle"),
    "a stage that is its own input": ("[first]", "[first, second]", 3, "stages", "second -> second", "no cycle"),
    "a source twice": ("[first]", "[first, first]", 8, "stages.second.inputs.1", "first", "once"),
    "two stages of one modality": (
        "[script]",
        "[script]\n    emits: audio",
        10,
        "stages.second.emits",
        "audio",
        "first",
    ),
    "a stage whose output goes nowhere": ("    emits: audio\n", "", 7, "stages.second", "second", "emits"),
    "a stage without any input": ("    accepts: [script]\n", "", 4, "stages.first", "first", "accepts"),
    "bad name of a stage": ("second:", "Second:", 7, "stages.Second", "Second", "name"),
    "the client's name": ("second:", "client:", 7, "stages.client", "client", "'client'"),
    "a key twice": ("    inputs", "    engine: echo\n    inputs", 8, "stages.second.engine", "engine", "once"),
    "unknown field of an optional section": (
        "    inputs",
        "    autoscale: {mxa: 3}\n    inputs",
        8,
        "stages.second.autoscale.mxa",
        3,
        "did you mean 'max'?",
    ),
    "no stages": (GOOD, "name: two\n", None, "stages", None, "stage"),
    "no name": ("name: two\n", "", None, "name", None, "a value for 'name'"),
    "unknown field at the top": ("name: two", "name: two\nlimit: {}", 2, "limit", [], "'limits'"),
    "a section by a similar name": (
        "stages:",
        "stage:",
        3,
        "stage",
        ["first", "second"],
        "limits, modalities, name, pin_rings, stages, start_timeout_s; did you mean 'stages'?",
    ),
    "the source of the document inside it": (
        "name: two",
        "name: two\nfile: x",
        2,
        "file",
        "x",
        "one of async_chunk, cluster, cpu_sharing, description, device_handles, limits",
    ),
    "empty": (GOOD, "", None, "(document)", None, "mapping"),
    "a list": (GOOD, "- 1\n", None, "(document)", [1], "mapping"),
    "a model that does not exist": (
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


def test_an_engine_that_needs_a_model_is_refused_without_one(good: Path) -> None:
    good.write_text(GOOD.replace("engine: echo\n    accepts", "engine: llm\n    accepts"))
    error = refused(good)
    assert (error.file, error.path, error.found) == (f"{good}:4", "stages.first.model", None)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        pytest.param("name: [unclosed\n# end", 2, id="syntax"),
        pytest.param("a: 1\n--- \nb: 2\n", 2, id="two documents"),
        pytest.param("name: !!python/name:os.system\n", 1, id="a tag that is not plain YAML"),
        pytest.param("name: x\nstages: [1,\n  2026-99-99]\n", 3, id="an impossible date"),
        pytest.param("name: x\nlimits: !!int\n", 2, id="an integer without a digit"),
        pytest.param("name: !!bool maybe\n", 1, id="neither true nor false"),
        pytest.param("name: !!timestamp never\n", 1, id="no time"),
        pytest.param("name: x\nstages: &all {a: *all}\n", 2, id="a mapping inside itself"),
        pytest.param("name: x\nstages: &all [*all]\n", 2, id="a list inside itself"),
    ],
)
def test_a_file_that_is_not_yaml_is_refused_by_name_and_line(text: str, line: int | None, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    error = refused(path)
    assert (error.file, error.path) == (f"{path}:{line}" if line else str(path), "(document)")


def test_a_tab_as_indentation_is_named_and_shown_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "tabs.yaml"
    path.write_text("name: x\nstages:\n\tfirst: {}\n")
    error = refused(path)
    assert (error.file, error.found) == (f"{path}:3", "\tfirst: {}")
    assert "use spaces" in error.accepted


def test_an_error_about_a_command_line_override_names_the_flag(good: Path) -> None:
    error = refused(good, config.parse_overrides(["stages.first.threds=2"]))
    assert str(error).startswith("--set: stages.first.threds: found 2; accepted: one of ")


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("name: Präludium".encode("latin-1"))
    assert refused(path).path == "(document)"


def test_the_error_for_an_unknown_name_lists_the_known_names() -> None:
    error = refused("ecco")
    assert (error.file, error.found) == ("ecco", "ecco")
    assert all(name in error.accepted for name in config.config_names())
    assert "did you mean 'echo'?" in error.accepted


@pytest.mark.parametrize("name", ["nowhere/at_all", "nowhere.yaml", "."])
def test_a_path_must_name_a_file(name: str, tmp_path: Path) -> None:
    assert "YAML file" in refused(name).accepted


@pytest.mark.parametrize(
    ("overrides", "place", "found", "accepted"),
    [
        ({"stages.frist.threads": 1}, "stages.frist", "frist", "did you mean 'first'?"),
        ({"stages.first.threds": 1}, "stages.first.threds", 1, "did you mean 'threads'?"),
        ({"stages.first.threads": "one"}, "stages.first.threads", "one", "an integer"),
        ({"stages.first.engine": "ehco"}, "stages.first.engine", "ehco", "did you mean 'echo'?"),
        ({"stages.first.accepts.0": "a"}, "stages.first.accepts", ["script"], "mapping"),
        ({"stages.second.inputs": ["frist"]}, "stages.second.inputs.0", "frist", "did you mean 'first'?"),
        ({"stages.second.emits": None}, "stages.second", "second", "emits"),
        ({"stages.first.options": {"fan_out": 0}}, "stages.first.options.fan_out", 0, ">= 1"),
        ({"stages": {}}, "stages", {}, "mapping"),
        ({"limits.max_requests": 0}, "limits.max_requests", 0, ">= 1"),
        ({"wait_redy": False}, "wait_redy", False, "start_timeout_s; did you mean 'wait_ready'?"),
        ({"threads": 2}, "threads", 2, "; for one stage: stages.NAME.threads"),
        ({"stages": {"first": {"threads": 2}}}, "stages.first.engine", None, "replaces the whole mapping"),
        *(
            ({f"{RESTART}.{field}": value}, f"{RESTART}.{field}", value, accepted)
            for field, value, accepted in [
                ("backoff_s", 11.0, "at most backoff_max_s, which is 10.0"),
                ("backoff_max_s", 0.05, "at least backoff_s, which is 0.1 by default"),
                ("retry_s", 601.0, "at most retry_max_s, which is 600.0"),
            ]
        ),
    ],
)
def test_an_error_about_an_override_names_the_override(
    overrides: dict[str, Any], place: str, found: object, accepted: str, good: Path
) -> None:
    error = refused(good, overrides)
    assert (error.path, error.found) == (place, found)
    assert accepted in error.accepted
    if place not in ("stages", "stages.second"):  # a mapping of the file that lacks something
        assert error.file == "overrides"


def test_the_parameters_that_a_keyword_may_mean_are_those_of_open() -> None:
    keyword_only = [each for each in signature(OmniSystem.open).parameters.values() if each.kind is each.KEYWORD_ONLY]
    assert sorted(each.name for each in keyword_only) == list(OPEN_PARAMETERS)


def test_a_field_may_equal_its_bound(good: Path) -> None:
    restart = config.load(good, {"stages.first.restart": {"backoff_s": 10, "retry_s": 600}}).stages["first"].restart
    assert (restart.backoff_s, restart.retry_s) == (restart.backoff_max_s, restart.retry_max_s)


def test_a_pipeline_object_is_checked_like_a_file() -> None:
    stage = Stage(engine="echo", accepts=("script",), emits="text")
    pipeline = Pipeline(name="one", stages={"only": stage}, file="mine")
    assert config.load(pipeline) == pipeline
    error = refused(msgspec.structs.replace(pipeline, stages={"only": msgspec.structs.replace(stage, replicas=-1)}))
    assert (error.file, error.path, error.found) == ("mine", "stages.only.replicas", -1)


def test_every_shipped_pipeline_is_valid() -> None:
    assert "voice" in config.config_names()
    for name in config.config_names():
        assert config.load(name).name == name


def test_no_shipped_pipeline_has_a_deterministic_stage_below_a_resumable_one() -> None:
    """The floats of resumed chunks may differ, and a deterministic stage that computes with them would too."""
    deterministic: dict[str, set[str]] = {}
    for name in config.config_names():
        pipeline = config.load(name)
        for stage, configured in pipeline.stages.items():
            assert pipeline.deterministic(stage) != pipeline.resumable(stage)
            if pipeline.deterministic(stage):
                assert not any(pipeline.resumable(source) for source in configured.inputs)
                deterministic.setdefault(name, set()).add(stage)
    encoders = {"text_encoder", "image_encoder"}
    assert deterministic == {  # docs/reliability.md names them
        "echo": {"first", "second"},
        "qwen_image": encoders,
        "qwen_image_edit": encoders,
        "shapes": encoders,
    }


@pytest.mark.parametrize("name", ["qwen3_omni", "qwen2_5_omni"])
def test_an_omni_pipeline_names_its_model_once_and_its_parts_fit_together(name: str) -> None:
    pipeline = config.load(name)
    thinker, talker, _ = pipeline.stages.values()
    assert len({stage.model for stage in pipeline.stages.values()}) == 1
    longest = pipeline.options("thinker")["context"]
    assert pipeline.options("talker")["context"] >= longest + talker.defaults["talker_max_tokens"]
    row_bytes = 2 * {"qwen3_omni": 2048, "qwen2_5_omni": 3584}[name]  # bfloat16
    assert thinker.ring_bytes >= 2 * pipeline.options("thinker")["prefill_chunk"] * row_bytes, (
        "each chunk crosses its ring in one copy"
    )
    assert pipeline.limits.retain_bytes > longest * row_bytes, "a restarted talker can be replayed"
    assert pipeline.limits.worker_retain_bytes > pipeline.limits.retain_bytes


def test_anchors_and_aliases_keep_the_line_of_the_value(good: Path) -> None:
    text = GOOD.replace(
        "accepts: [script]", "accepts: [script]\n    model: &model m\n    restart: &restart {period_s: 9}"
    )
    good.write_text(text.replace("emits: audio", "emits: audio\n    model: *model\n    restart: *restart"))
    rows = {row.path: row for row in config.explain(good, {"stages.first.restart.period_s": 8})}
    assert (rows["stages.second.model"].value, rows["stages.second.model"].origin) == ("m", f"{good}:6")
    assert [rows[f"stages.{name}.restart.period_s"].value for name in ("first", "second")] == [8.0, 9.0]


def test_explain_gives_the_origin_of_each_value(good: Path) -> None:
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


def test_overriding_a_whole_mapping_removes_the_origins_of_its_old_values(good: Path) -> None:
    good.write_text(GOOD.replace("[script]", "[script]\n    options:\n      step_s: 1.5\n      spin: true"))
    rows = {row.path: row for row in config.explain(good, {"stages.first.options": {"step_s": 2}})}
    assert (rows["stages.first.options.step_s"].value, rows["stages.first.options.step_s"].origin) == (2.0, "overrides")
    assert (rows["stages.first.options.spin"].value, rows["stages.first.options.spin"].origin) == (False, "default")


def test_explain_of_a_pipeline_object_gives_its_source_as_origin() -> None:
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


@pytest.mark.parametrize("assignment", ["a=!!int", "a", "=1", "", "a=[1", "a=2026-99-99", "a=!!python/name:os.system"])
def test_parse_overrides_refuses_a_malformed_assignment(assignment: str) -> None:
    with pytest.raises(ConfigError, match=r"^--set: ") as caught:
        config.parse_overrides([assignment])
    assert caught.value.file == "--set"


def test_cores_are_shared_by_rules_where_a_stage_computes_on_the_cpu_unless_configured(good: Path) -> None:
    on_gpus = {"stages.first.device": "cuda:0", "stages.second.device": "cuda:1"}
    assert config.load(good).shares_cores
    assert config.load(good, {"stages.first.device": "cuda:0"}).shares_cores
    assert not config.load(good, on_gpus).shares_cores
    assert config.load(good, {**on_gpus, "cpu_sharing": True}).shares_cores
    off = config.load(good, {"cpu_sharing": False})
    assert not off.shares_cores
    assert off.spins


def test_cores_are_divided_among_the_workers_unless_threads_are_configured(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    pipeline = config.load(good, {"stages.second.replicas": 3, "stages.first.threads": 5})
    assert (pipeline.threads("first"), pipeline.threads("second")) == (5, 2)
    assert not pipeline.spins, "5 + 3 x 2 threads are too many for 8 cores"
    assert config.load(good, {"stages.first.threads": 8, "stages.second.threads": 1}).spins, (
        "one multi-threaded worker on all cores"
    )
