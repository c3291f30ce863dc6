"""Documents, names and overrides that few write: a ConfigError names each, and no other error is raised."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_actors import config
from omni_actors.errors import ConfigError
from tests.support.two_stages import GOOD

OWN_ENGINE = "  third:\n    engine: tests.nowhere:f\n    inputs: [first]\n    emits: own\n"
BOMB_OF_LISTS = "    options:\n      a0: &a0 [1]\n" + "".join(
    f"      a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 4)}]\n" for i in range(1, 30)
)
BOMB_OF_MAPPINGS = "    options:\n      a0: &a0 {k: 1}\n" + "".join(
    f"      a{i}: &a{i} {{a: *a{i - 1}, b: *a{i - 1}, c: *a{i - 1}, d: *a{i - 1}}}\n" for i in range(1, 30)
)
BOMB_OF_TEXT = f"    options:\n      a: &a {'x' * 2**16}\n      b: [{', '.join(['*a'] * 2**17)}]\n"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "two.yaml"
    path.write_text(GOOD)
    return path


@pytest.mark.parametrize(
    ("text", "line", "place", "accepted"),
    [
        pytest.param("name: [unclosed\n", 2, "(document)", "<stream end>", id="a list that the end cuts"),
        pytest.param('name: "unclosed\n', 2, "(document)", "end of stream", id="a text that the end cuts"),
        pytest.param(GOOD + "    <<: {nice: 1}\n", 10, "stages.second.<<", "no merge of mappings", id="merge key"),
        pytest.param('name: "a\\e[2J"\n' + GOOD[10:], 1, "name", "printable", id="a name that controls a terminal"),
        pytest.param('name: ""\n' + GOOD[10:], 1, "name", "printable", id="no characters in a name"),
        pytest.param(
            GOOD.replace("  second:", '  "second\\n":'), 7, "stages.second\n", "matches", id="a name with a line break"
        ),
        pytest.param(
            GOOD + f"    options: {{fan_out: {2**64}}}\n",
            *(10, "stages.second.options", "that can be sent"),
            id="an integer that no message holds",
        ),
        pytest.param(
            GOOD + "    replicas: 10000000000000\n",
            *(10, "stages.second.replicas", "<= 64"),
            id="more workers than memory",
        ),
        pytest.param(
            GOOD + f"limits: {{worker_retain_bytes: {2**64}}}\n",
            *(10, "limits.worker_retain_bytes", "<= 9007199254740992"),
            id="bytes that no message holds",
        ),
        pytest.param(
            GOOD.replace("engine: echo\n    i", "engine: __main__:f\n    i"),
            *(7, "stages.second.engine", "no package '__main__'"),
            id="an engine of a script",
        ),
        pytest.param(
            GOOD + f"    replicas: 0x{'f' * 4000}\n",
            *(10, "stages.second.replicas", "an integer <= 64"),
            id="an integer that Python does not show",
        ),
        pytest.param(
            GOOD + f"    replicas: {'9' * 5000}\n",
            10,
            "(document)",
            "valid YAML",
            id="an integer that Python does not read",
        ),
        pytest.param(GOOD + BOMB_OF_LISTS, 21, "(document)", "aliases", id="lists that aliases multiply"),
        pytest.param(GOOD + BOMB_OF_MAPPINGS, 20, "(document)", "aliases", id="mappings that aliases multiply"),
        pytest.param(GOOD + BOMB_OF_TEXT, 12, "(document)", "aliases", id="a text that aliases multiply"),
        pytest.param(
            GOOD + OWN_ENGINE + f"    defaults: {{seed: {2**64}}}\n",
            *(14, "stages.third.defaults", "that can be sent"),
            id="a parameter that no message holds",
        ),
        pytest.param(
            GOOD + OWN_ENGINE + f"    defaults: {{voice: {'x' * 2**16}}}\n",
            *(14, "stages.third.defaults", "of at most 65536 bytes"),
            id="more parameters than a message holds",
        ),
        pytest.param(
            GOOD + OWN_ENGINE + "    options:\n      voices:\n        - {name: a, name: b}\n",
            *(16, "stages.third.options.voices.0.name", "each key once"),
            id="a key twice in a list",
        ),
    ],
)
def test_an_unusual_document_is_refused_where_it_is_unusual(
    text: str, line: int, place: str, accepted: str, tmp_path: Path
) -> None:
    path = tmp_path / "unusual.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    assert (caught.value.file, caught.value.path) == (f"{path}:{line}", place)
    assert accepted in caught.value.accepted


@pytest.mark.parametrize("entry", ["A: 1", "A-B: text"])
def test_an_error_about_variables_shows_no_others(entry: str, good: Path) -> None:
    good.write_text(f"{GOOD}    env:\n      {entry}\n      TOKEN: secret\n")
    with pytest.raises(ConfigError, match=r"stages\.second\.env") as caught:
        config.load(good)
    assert caught.value.file == f"{good}:11"
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["a" * 300, "~nobody-of-this-name/x.yaml", "a" * 300 + ".yaml"])
def test_a_name_that_no_file_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(name)
    assert caught.value.file == name


def test_overrides_change_nothing_of_the_caller(good: Path) -> None:
    options = {"fan_out": 1}
    overrides = {"stages.first.options": options, "stages.first.options.fan_out": 2}
    assert config.load(good, overrides).options("first")["fan_out"] == 2
    assert options == {"fan_out": 1}


@pytest.mark.parametrize(
    "path", ["start_timeout_s", "limits.max_requests", "stages.first.nice", "stages.first.\ud800", "\ud800"]
)
def test_text_that_utf_8_does_not_have_is_refused(path: str, good: Path) -> None:
    with pytest.raises(ConfigError, match="text in UTF-8") as caught:
        config.load(good, {path: "\ud800"})
    assert (caught.value.file, caught.value.path) == ("overrides", path)


def test_an_error_inside_a_mapping_that_an_override_makes_names_the_override(good: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(good, config.parse_overrides(["stages.first.options.nothing.x=1"]))
    assert (caught.value.file, caught.value.path) == ("--set", "stages.first.options.nothing")


def test_a_value_of_hundreds_of_levels_is_refused() -> None:
    with pytest.raises(ConfigError, match="--set"):
        config.parse_overrides(["name=" + "[" * 3000])


def test_the_text_of_an_error_repeats_a_part_of_a_large_value(tmp_path: Path) -> None:
    path = tmp_path / "text.yaml"
    path.write_text("word " * 1000)
    with pytest.raises(ConfigError) as caught:
        config.load(path)
    assert len(str(caught.value)) < 500 + len(str(path))
