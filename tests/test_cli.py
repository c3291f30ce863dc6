"""The command line, as a user meets it: what goes to which stream, exit codes, Ctrl-C. On the echo pipeline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import soundfile
from click.testing import CliRunner, Result

import omni_actors
from omni_actors import config as configuration
from omni_actors.cli import main

ROOT = Path(omni_actors.__file__).parent.parent
WATCHDOG_S = 60.0
PROGRAM = "from omni_actors.cli import main; main(prog_name='omni-actors')"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


class Command:
    """The real thing, in a process group of its own, as a shell starts it."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=WATCHDOG_S)
        return self.process.returncode, out, err


@pytest.fixture
def talkative(tmp_path: Path) -> Path:
    """A pipeline that repeats its input for minutes."""
    path = tmp_path / "talkative.yaml"
    path.write_text("""\
name: talkative
stages:
  first:
    engine: echo
    accepts: [messages]
    emits: text
    options: {fan_out: 1000000, step_s: 0.01}
""")
    return path


# ask


def test_ask_as_json_is_one_object_on_standard_output() -> None:
    result = invoke("ask", "--config", "echo", "hello", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    answer = json.loads(result.stdout)
    assert answer["text"] == "hello"
    assert answer["output"] is None
    assert set(answer["metrics"]["stages"]) == {"first"}
    assert answer["metrics"]["ttft_s"] > 0


def test_ask_prints_the_answer_alone_on_standard_output() -> None:
    code, out, err = Command("ask", "--config", "echo", "hello").finish()
    assert (code, out) == (0, "hello\n")
    assert "2 stages ready" in err
    assert "TTFT" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ask", "--config", "ecco", "hi"], "did you mean 'echo'?"),
        (["ask", "--config", "echo", "hi", "-s", "stages.frist.threads=1"], "did you mean 'first'?"),
        (["ask", "--config", "echo", "hi", "-s", "nonsense"], "path.to.value=VALUE"),
        (["ask", "--config", "echo"], "QUESTION"),
        (["ask", "--config", "echo", "hi", "--max-tokens", "0"], "--max-tokens"),
        (["ask", "--config", "echo", "--audio", "nowhere.wav"], "nowhere.wav"),
        (["ask", "--config", "echo", "--audio", str(Path(__file__))], "--audio"),
        (["config", "explain", "ecco"], "did you mean 'echo'?"),
        (["config", "explain", "echo", "-s", "stages.first.threads=many"], "stages.first.threads: found 'many'"),
        (["nonsense"], "nonsense"),
    ],
)
def test_what_cannot_be_asked_for_that_way_is_2_and_says_why(arguments: list[str], says: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["hi", "--temperature", "1"], "'temperature'"),
        (["hi", "-s", "stages.first.engine=sys:no_such_name"], "no_such_name"),
        (["hi", "-s", "stages.first.restart.intensity=0", "-s", "stages.first.engine=sys:exit"], "exited with code 1"),
    ],
)
def test_work_that_fails_is_1_and_says_why(talkative: Path, arguments: list[str], says: str) -> None:
    result = invoke("ask", "--config", str(talkative), *arguments)
    assert result.exit_code == 1
    assert says in result.stderr
    assert isinstance(result.exception, SystemExit), "a sentence, not a traceback"


def test_a_spoken_question_to_a_pipeline_without_ears_is_refused(talkative: Path, tmp_path: Path) -> None:
    path = tmp_path / "question.wav"
    soundfile.write(path, np.zeros(1600, np.float32), 16_000)
    result = invoke("ask", "--config", str(talkative), "--audio", str(path))
    assert result.exit_code == 1
    assert "'audio'" in result.stderr


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_it_answers_is_130_and_leaves_no_process(talkative: Path, sent: signal.Signals) -> None:
    command = Command("ask", "--config", str(talkative), "hello ")
    assert command.process.stdout is not None
    assert command.process.stdout.read(12) == "hello hello "
    workers = psutil.Process(command.process.pid).children(recursive=True)
    assert len(workers) == 1
    if sent is signal.SIGINT:
        os.killpg(command.process.pid, sent)  # as a terminal does
    else:
        command.process.send_signal(sent)
    code, _, err = command.finish()
    assert code == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(workers, timeout=WATCHDOG_S)
    assert not alive


def test_a_reader_that_goes_away_ends_the_answer(talkative: Path) -> None:
    command = Command("ask", "--config", str(talkative), "hello ")
    assert command.process.stdout is not None
    command.process.stdout.read(12)
    command.process.stdout.close()
    assert command.process.wait(WATCHDOG_S) == 1
    assert command.process.stderr is not None
    with command.process.stderr as stderr:
        assert "Traceback" not in stderr.read()


# config


def test_config_list_names_every_pipeline() -> None:
    result = invoke("config", "list")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == configuration.config_names()
    assert configuration.load("echo").description in result.stdout


def test_config_explain_shows_values_and_origins() -> None:
    result = invoke("config", "explain", "echo", "-s", "stages.first.threads=3")
    assert result.exit_code == 0
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines()}
    assert rows["stages.first.threads"] == ["stages.first.threads", "3", "overrides"]
    assert rows["stages.first.replicas"] == ["stages.first.replicas", "1", "default"]
    assert rows["stages.second.engine"][1:] == ['"echo"', rows["stages.second.engine"][2]]
    file, line = rows["stages.second.engine"][2].rsplit(":", 1)
    assert "engine: echo" in Path(file).read_text().splitlines()[int(line) - 1]


def test_config_explain_as_json_is_the_same() -> None:
    result = invoke("config", "explain", "echo", "--json")
    rows = json.loads(result.stdout)
    assert {"path": "limits.max_requests", "value": 64, "origin": "default"} in rows
    assert len(rows) == len(invoke("config", "explain", "echo").stdout.splitlines())


@pytest.fixture
def writer(tmp_path: Path) -> tuple[Path, Path]:
    """A pipeline with a model, and the model: 500 numbers, and a cache of 64 numbers a token."""
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    header = json.dumps({"a": {"dtype": "BF16", "shape": [50, 10], "data_offsets": [0, 1000]}}).encode()
    (checkpoint / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    decoder = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    (checkpoint / "config.json").write_text(json.dumps(decoder))
    path = tmp_path / "writer.yaml"
    path.write_text(f"""\
name: writer
stages:
  llm:
    engine: llm
    model: {checkpoint}
    accepts: [messages]
    emits: text
    options: {{dtype: float32, max_batch: 4, context: 1000}}
""")
    return path, checkpoint


def test_config_explain_counts_the_memory_of_a_model(writer: tuple[Path, Path]) -> None:
    path, checkpoint = writer
    lines = invoke("config", "explain", str(path)).stdout.splitlines()
    assert [line.split() for line in lines[-2:]] == [
        ["stages.llm.memory.weights", "2.0", "kB", str(checkpoint)],
        ["stages.llm.memory.cache", "1.0", "MB", str(checkpoint / "config.json")],
    ]
    rows = json.loads(invoke("config", "explain", str(path), "--json", "-s", "stages.llm.options.dtype=float16").stdout)
    values = {row["path"]: row["value"] for row in rows}
    assert (values["stages.llm.memory.weights"], values["stages.llm.memory.cache"]) == (1000, 4000 * 64 * 2)


def test_config_explain_says_where_a_checkpoint_is_missing_and_what_it_does_not_say(writer: tuple[Path, Path]) -> None:
    path, checkpoint = writer
    (checkpoint / "config.json").unlink()
    line = invoke("config", "explain", str(path)).stdout.splitlines()[-1]
    assert line.split(maxsplit=2) == ["stages.llm.memory", "null", f"{checkpoint}: there is no config.json"]
    result = invoke("config", "explain", str(path), "--json", "-s", f"stages.llm.model={checkpoint}/no")
    assert result.exit_code == 0
    row = json.loads(result.stdout)[-1]
    assert (row["path"], row["value"]) == ("stages.llm.memory", None)
    assert "there is no such directory" in row["origin"]


def test_help_names_every_command() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    for command in ("ask", "config", "prepare", "serve"):
        assert command in result.stdout


def test_prepare_of_what_is_not_there_says_so() -> None:
    result = invoke("prepare", "ecco")
    assert result.exit_code == 2
    assert "did you mean 'echo'?" in result.stderr
    assert invoke("prepare", "echo").exit_code == 0, "no models, nothing to do"


def test_prepare_takes_a_models_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    result = invoke("prepare", "owner/name")
    assert result.exit_code == 1
    assert "pip install huggingface_hub" in result.stderr
