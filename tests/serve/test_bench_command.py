"""``omni-actors bench`` against real servers: ours, its own bare one, and one that breaks its answers off."""

from __future__ import annotations

import itertools
import json
import socket
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import parse_headers
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from omni_actors.cli import main
from omni_actors.cli.answer_events import SPEECH_RATE
from omni_actors.cli.bench.generator import Load, Run
from omni_actors.cli.bench.summary import summarize
from omni_actors.cli.bench.workload import Prompt, arrival_times, made_prompts, read_dataset
from omni_actors.cli.measurement import Measurement
from tests.support.http_server import Server

FEW = ("--requests", "3", "--concurrency", "2", "--warmup", "0")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments])


def figures_of(server: Server, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Run a small load, and return its JSON."""
    file = tmp_path / "figures.json"
    result = invoke("--url", server.url, *FEW, "--json", str(file), *arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.stdout
    found: dict[str, Any] = json.loads(file.read_bytes())
    assert (found["measured"], found["succeeded"], found["errors"]) == (3, 3, {})
    assert found["load"]["concurrency"] == 2
    return found


@pytest.mark.parametrize(
    ("arguments", "figures"),
    [
        (["--endpoint", "chat"], {"ttft", "itl", "e2e", "late"}),
        (["--endpoint", "chat", "--speak"], {"ttft", "itl", "ttfa", "rtf", "underruns", "gap", "e2e", "late"}),
        (["--endpoint", "completions"], {"ttft", "itl", "e2e", "late"}),
        (["--endpoint", "speech"], {"ttfa", "rtf", "underruns", "gap", "e2e", "late"}),
    ],
)
def test_each_endpoint_has_its_figures(arguments: list[str], figures: set[str], studio: Server, tmp_path: Path) -> None:
    found = figures_of(studio, tmp_path, *arguments)
    assert set(found["figures"]) - {"tpot"} == figures
    assert found["figures"]["e2e"]["count"] == 3
    for each in found["figures"].values():
        assert each["minimum"] <= each["percentiles"]["p50"] <= each["percentiles"]["p99"] <= each["maximum"]


def test_transcriptions_of_a_dataset(studio: Server, recording: Callable[..., bytes], tmp_path: Path) -> None:
    (tmp_path / "question.wav").write_bytes(recording())
    (tmp_path / "dataset.jsonl").write_text('{"audio": "question.wav"}\n')
    found = figures_of(studio, tmp_path, "--endpoint", "transcriptions", "--dataset", str(tmp_path / "dataset.jsonl"))
    assert {"ttft", "e2e"} <= set(found["figures"])
    spoken = figures_of(studio, tmp_path, "--speak", "--dataset", str(tmp_path / "dataset.jsonl"))
    assert spoken["figures"]["rtf"]["count"] == 3, "a sound file may be a question too"


def test_arrivals_and_goodput(studio: Server, tmp_path: Path) -> None:
    arguments = ("--rate", "50", "--arrivals", "constant", "--requests", "4", "--warmup", "0")
    file = tmp_path / "figures.json"
    goals = ("--goal", "ttft=60", "--goal", "e2e=60")
    result = invoke("--url", studio.url, *arguments, *goals, "--json", str(file), "--markdown", str(tmp_path / "t.md"))
    assert result.exit_code == 0, result.stderr
    found = json.loads(file.read_bytes())
    assert found["goodput"]["requests"] == 4
    assert found["goodput"]["bounds"] == {"ttft": 60, "e2e": 60}
    assert found["figures"]["late"]["minimum"] >= 0
    assert "goodput with ttft ≤ 60, e2e ≤ 60: 4 of 4 requests (100.0%)" in result.stdout
    assert (tmp_path / "t.md").read_text() == result.stdout
    nothing = invoke("--url", studio.url, *arguments, "--goal", "ttft=0")
    assert "0 of 4 requests (0.0%)" in nothing.stdout


def test_refusals_are_counted_by_kind(studio: Server) -> None:
    result = invoke("--url", studio.url, *FEW, "--model", "nothing")
    assert result.exit_code == 1
    assert "errors: 3 × 404 model_not_found" in result.stdout
    warm = invoke("--url", studio.url, "--model", "nothing")
    assert warm.exit_code == 1
    assert "'nothing'" in warm.stderr, "the warm-up tells the reason at once"


@pytest.fixture
def breaking_server() -> Iterator[str]:
    """A server that ends each answer after its first event: once within the body, once with an orderly end."""
    event = b'data: {"choices": [{"delta": {"content": "word"}}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"
    answers = itertools.cycle(
        (head + b"content-length: 9999\r\n\r\n" + event, head + b"content-length: %d\r\n\r\n" % len(event) + event)
    )

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                connection, _ = listener.accept()
                with connection, connection.makefile("rb") as request:
                    request.readline()
                    size = int(parse_headers(request)["content-length"])
                    request.read(size)  # closing with unread bytes would reset the connection, and lose the answer
                    connection.sendall(next(answers))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_an_answer_that_breaks_off_is_an_error_of_its_kind(breaking_server: str) -> None:
    arguments = ("--url", breaking_server, "--model", "any", "--requests", "4", "--warmup", "0")
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert "2 × connection" in result.stdout
    assert "2 × incomplete answer" in result.stdout
    assert "0 of 4 requests succeeded" in result.stdout


def test_the_generator_measures_itself(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    result = invoke("--self-test", *FEW, "--max-tokens", "4", "--speak", "--json", str(file))
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(file.read_bytes())
    assert found["figures"]["delay"]["count"] == 3 * (2 * 4 + 1)
    assert found["figures"]["delay"]["minimum"] >= 0
    assert found["figures"]["tpot"]["count"] == 3
    assert found["generator_cpu_s_per_request"] > 0


PLOTTED = ("--self-test", *FEW, "--max-tokens", "2", "--plot")


def test_a_plot_needs_matplotlib_and_says_so_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke(*PLOTTED, str(tmp_path / "plot.svg"))
    assert result.exit_code == 2
    assert "pip install '.[bench]' in the clone" in result.stderr


def test_a_plot_is_written_in_the_format_of_its_name(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'bench' is not installed")
    assert invoke(*PLOTTED, str(tmp_path / "plot.svg")).exit_code == 0
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    assert invoke(*PLOTTED, str(tmp_path / "figures")).exit_code == 0
    assert (tmp_path / "figures.png").exists()
    unknown = invoke(*PLOTTED, str(tmp_path / "plot.xyz"))
    assert unknown.exit_code == 2
    assert "plot.xyz: accepted are" in unknown.stderr
    assert unknown.stdout == "", "it is said before the run"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "1", "--concurrency", "2"], "not both"),
        (["--rate", "nan"], "'nan' is not a number"),
        (["--rate", "inf"], "not in the range"),
        (["--timeout", "nan"], "'nan' is not a number"),
        (["--url", "localhost:8091"], "is not a URL such as http://localhost:8091"),
        (["--url", "http://localhost:port"], "is not a URL: "),
        (["--endpoint", "transcriptions"], "transcriptions need a --dataset"),
        (["--goal", "speed=1"], "FIGURE=MOST"),
        (["--goal", "ttft=fast"], "FIGURE=MOST"),
        (["--words", "9-3"], "--words"),
        (["--extra", "[]"], "not a JSON object"),
        (["--json", "/no/such/directory/file.json"], "there is no directory"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_dataset_for_transcriptions_has_a_recording_in_each_line(tmp_path: Path) -> None:
    (tmp_path / "a.wav").touch()
    (dataset := tmp_path / "dataset.jsonl").write_text('{"audio": "a.wav"}\n{"prompt": "hello"}\n')
    result = invoke("--endpoint", "transcriptions", "--dataset", str(dataset))
    assert result.exit_code == 2
    assert "each with the field audio" in result.stderr
    dataset.write_text('{"audio": "b.wav"}\n')
    result = invoke("--endpoint", "transcriptions", "--dataset", str(dataset))
    assert result.exit_code == 2
    assert f"there is no file {tmp_path / 'b.wav'}" in result.stderr


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    with socket.socket() as held:  # bound, so that no other program gets the port, and not listening
        held.bind(("127.0.0.1", 0))
        gone = invoke("--url", f"http://127.0.0.1:{held.getsockname()[1]}")
    assert gone.exit_code == 1
    assert "the connection failed" in gone.stderr
    assert "Traceback" not in gone.stderr


def test_arrival_times_follow_from_the_seed() -> None:
    def times(kind: Any, seed: int, count: int = 20_000) -> list[float]:
        return list(itertools.islice(arrival_times(kind, 10.0, seed), count))

    assert times("constant", 1, 4) == pytest.approx([0, 0.1, 0.2, 0.3])
    assert times("poisson", 1) == times("poisson", 1) != times("poisson", 2)
    gaps = [b - a for a, b in itertools.pairwise(times("poisson", 3))]
    assert sum(gaps) / len(gaps) == pytest.approx(0.1, rel=0.05)
    longer = sum(gap > 0.1 for gap in gaps) / len(gaps)
    assert longer == pytest.approx(0.368, abs=0.02), "1/e of exponential gaps are longer than the mean"


def test_made_prompts_differ_and_have_the_length_asked_for() -> None:
    made = [prompt.prompt for prompt in itertools.islice(made_prompts(3, 5, 7), 50)]
    assert len(set(made)) == 50
    assert {len(prompt.split()) for prompt in made} == {3, 4, 5}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "\n\n", "there is no prompt in it"),
        ("bad.jsonl", '{"prompt": "a"}\n{"promt": "b"}\n', "bad.jsonl:2"),
        ("none.jsonl", "{}\n", "at least one of them"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_named_with_its_line(
    name: str, content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    result = invoke("--dataset", str(tmp_path / name))
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")


@pytest.mark.parametrize("endpoint", ["completions", "images", "speech"])
def test_a_dataset_must_have_what_the_endpoint_sends(endpoint: str, tmp_path: Path) -> None:
    lines = '{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n'
    (dataset := tmp_path / "dataset.jsonl").write_text(lines)
    result = invoke("--endpoint", endpoint, "--dataset", str(dataset))
    assert result.exit_code == 2
    assert f"the endpoint {endpoint} needs the field prompt" in " ".join(result.stderr.split())


def test_a_text_is_a_dataset_of_its_lines(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    assert read_dataset(tmp_path / "prompts.txt") == [Prompt("one"), Prompt("two")]


def test_a_line_of_a_dataset_ends_with_a_newline_alone(tmp_path: Path) -> None:
    text = "a\u2028b\x85c\x0cd"
    line = json.dumps({"prompt": text}, ensure_ascii=False)
    (tmp_path / "prompts.jsonl").write_text(f"\ufeff{line}\r\n{line}\n", encoding="utf-8", newline="")
    assert read_dataset(tmp_path / "prompts.jsonl") == [Prompt(text), Prompt(text)]


def test_times_count_from_when_a_request_was_due_and_goodput_needs_every_figure() -> None:
    late = Measurement(due=10.0, sent=12.0)
    late.add_text(13.0)
    late.add_text(13.5)
    late.add_sound(SPEECH_RATE * 2, 14.0)  # one second of 16-bit samples
    late.add_sound(SPEECH_RATE * 2, 15.6)
    late.ended, late.tokens = 16.0, 3
    silent = Measurement(due=0.0, sent=0.0)
    silent.add_text(0.5)
    silent.ended = 1.0
    failed = Measurement(due=0.0, sent=0.0)
    failed.error, failed.ended = "timeout", 5.0

    figures = late.figures()
    assert figures == pytest.approx(
        {"e2e": 6, "late": 2, "ttft": 3, "tpot": 0.25, "ttfa": 4, "underruns": 1, "gap": 0.6, "rtf": 3}
    )
    load = Load(endpoint="chat", requests=3)
    run = Run([late, silent, failed], elapsed_s=2.0, cpu_s=0.1)
    summary = summarize(run, load, {"ttft": 3.5, "underruns": 1})
    assert summary.goodput is not None
    assert (summary.goodput.requests, summary.goodput.share) == (1, pytest.approx(1 / 3)), "silent has no underruns"
    assert (summary.measured, summary.succeeded, summary.errors) == (3, 2, {"timeout": 1})
    assert summary.figures["itl"].count == 1
    assert summary.figures["ttft"].maximum == 3
    assert late.intervals == array("d", [0.5])
