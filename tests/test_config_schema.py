"""The JSON schema of pipeline files: it accepts every shipped file, and an editor finds mistakes with it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from omni_actors.cli import main
from omni_actors.config.json_schema import json_schema
from tests.support.readme import ROOT


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    """The schema as the command prints it."""
    result = CliRunner().invoke(main, ["config", "schema"])
    assert (result.exit_code, result.stderr) == (0, "")
    schema = json.loads(result.stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_pipeline_is_valid(path: Any, validator: jsonschema.Draft202012Validator) -> None:
    assert [error.message for error in validator.iter_errors(yaml.safe_load(path.read_text()))] == []


VALID = """\
name: mine
stages:
  first: {engine: echo, accepts: [messages], emits: text}
"""


@pytest.mark.parametrize(
    ("changed", "where", "message"),
    [
        (("name: mine", "nam: mine"), "", "'nam' was unexpected"),
        (("name: mine\n", ""), "", "'name' is a required property"),
        (("engine: echo, ", ""), "stages.first", "'engine' is a required property"),
        (("engine: echo", "engine: ecco"), "stages.first.engine", "'ecco' is not valid under any of the given schemas"),
        (("emits: text", "nice: 20"), "stages.first.nice", "20 is greater than the maximum of 19"),
        (("emits: text", "options: {fan_out: 0}"), "stages.first.options.fan_out", "0 is less than the minimum of 1"),
        (("emits: text", "defaults: {voice: x}"), "stages.first.defaults", "'voice' was unexpected"),
        (("first:", "First:"), "stages", "'First' does not match"),
    ],
)
def test_a_mistake_is_found_at_its_place(
    changed: tuple[str, str], where: str, message: str, validator: jsonschema.Draft202012Validator
) -> None:
    assert validator.is_valid(yaml.safe_load(VALID))
    errors = validator.iter_errors(yaml.safe_load(VALID.replace(*changed)))
    found = [(".".join(map(str, error.absolute_path)), error.message) for error in errors]
    assert [text for place, text in found if place == where and message in text], found


def test_a_file_that_extends_another_one_may_leave_things_out(validator: jsonschema.Draft202012Validator) -> None:
    assert validator.is_valid({"extends": "voice", "stages": {"llm": {"threads": 1}, "whisper": None}})
    assert not validator.is_valid({"extends": "voice", "stages": {"llm": {"threads": -1}}})


def test_every_field_of_a_stage_is_described() -> None:
    schema = json_schema()
    for definition in (schema["$defs"]["Stage"], schema["$defs"]["Restart"], schema["$defs"]["Limits"]):
        assert not [name for name, field in definition["properties"].items() if not field.get("description")]
    assert schema["$defs"]["EchoOptions"]["properties"]["step_s"]["description"].startswith("Simulated duration")
