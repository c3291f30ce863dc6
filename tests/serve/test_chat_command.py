"""``omni-actors chat``: in a pipe, and on a terminal (a pty), against real servers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pexpect
import pytest
import soundfile
from PIL import Image

from omni_actors.cli.chat.reader import MAX_MESSAGE_CHARACTERS
from tests.serve.conftest import Gallery
from tests.support.http_server import WATCHDOG_S, Server, Start, until
from tests.support.media_inputs import image_file
from tests.support.readme import ROOT

PROMPT = r">[\x08 ]*\x1b\[2C|> "
"""The prompt as it is drawn: the cursor may be moved instead of writing the space."""
PROGRAM = (sys.executable, "-m", "omni_actors", "chat")


def environment(home: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home), "XDG_STATE_HOME": str(home / "state"), **more}


def pipe(home: Path, messages: str, *arguments: str, **more: str) -> tuple[int, str, str]:
    """Run the command with messages on standard input; return its exit code and what it wrote."""
    done = subprocess.run(
        [*PROGRAM, *arguments],
        input=messages,
        env=environment(home, **more),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., pexpect.spawn[str]]]:
    """Start the command on a pty."""
    started: list[pexpect.spawn[str]] = []

    def start(*arguments: str) -> pexpect.spawn[str]:
        command = [*PROGRAM[1:], *arguments]
        variables = environment(tmp_path, TERM="xterm", PROMPT_TOOLKIT_NO_CPR="1", NO_COLOR="1")
        child = pexpect.spawn(
            PROGRAM[0],
            command,
            env=variables,
            cwd=str(ROOT),
            timeout=WATCHDOG_S,
            encoding="utf-8",
            dimensions=(40, 160),
        )
        started.append(child)
        return child

    yield start
    for child in started:
        child.close(force=True)


def exit_code(child: pexpect.spawn[str]) -> int | None:
    child.expect(pexpect.EOF)
    child.wait()
    code: int | None = child.exitstatus
    return code


def test_a_pipe_gets_the_answers_alone(studio: Server, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    code, out, err = pipe(
        tmp_path,
        f"hello\nover \\\ntwo lines\n\n/stats\n/save {saved}\n",
        "--url",
        studio.url,
        "--commands",
        "--system",
        "Be brief.",
    )
    assert (code, out) == (0, "hellohellohello\n" + 3 * "over \ntwo lines" + "\n"), err
    assert "TTFT" in err
    assert "2 answers" in err
    messages = json.loads(saved.read_text())["messages"]
    assert [each["role"] for each in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[3]["content"] == "over \ntwo lines"


def test_text_from_a_pipe_is_text(studio: Server, tmp_path: Path) -> None:
    """A text that was written by others may contain lines that begin with a slash."""
    secret = tmp_path / "secret.json"
    code, out, err = pipe(tmp_path, f"/save {secret}\n/quit\n", "--url", studio.url)
    assert (code, out) == (0, 3 * f"/save {secret}" + "\n" + 3 * "/quit" + "\n"), err
    assert not secret.exists()


def test_a_message_that_is_too_long_is_not_sent_and_the_next_one_is(studio: Server, tmp_path: Path) -> None:
    """The line is longer than the reader's bound; what is beyond it is no message of its own."""
    code, out, err = pipe(tmp_path, "x" * (MAX_MESSAGE_CHARACTERS + 100) + "\nhello\n", "--url", studio.url)
    assert (code, out) == (1, "hellohellohello\n")
    assert err == f"a message is longer than {MAX_MESSAGE_CHARACTERS} characters; it was not sent\n"
    parts = ("y" * (MAX_MESSAGE_CHARACTERS // 2) + "\\\n") * 3
    code, out, err = pipe(tmp_path, f"{parts}end\nhello\n", "--url", studio.url)
    assert (code, out) == (1, "hellohellohello\n"), "the parts of one message count together"


def test_bytes_that_are_no_text_do_not_end_the_conversation(studio: Server, tmp_path: Path) -> None:
    done = subprocess.run(
        [*PROGRAM, "--url", studio.url],
        input=b"a\xff\r\nhello",
        env=environment(tmp_path),
        cwd=ROOT,
        capture_output=True,
        timeout=WATCHDOG_S,
        check=False,
    )
    assert (done.returncode, done.stdout.decode()) == (0, "a\ufffd" * 3 + "\nhellohellohello\n"), done.stderr


def test_a_character_that_the_terminal_does_not_have_does_not_end_the_conversation(
    studio: Server, tmp_path: Path
) -> None:
    code, out, err = pipe(tmp_path, "5 → 6\nnext\n", "--url", studio.url, PYTHONIOENCODING="iso-8859-1")
    assert (code, out) == (0, 3 * "5 ? 6" + "\n" + 3 * "next" + "\n"), err


@pytest.mark.parametrize("where", [["--url", "URL"], ["echo"]], ids=["server", "local"])
def test_a_pipe_that_is_closed_ends_the_conversation_quietly(where: list[str], studio: Server, tmp_path: Path) -> None:
    arguments = [each.replace("URL", studio.url) for each in where]
    process = subprocess.Popen(
        [*PROGRAM, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tmp_path),
        cwd=ROOT,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write("one\n")
    process.stdin.flush()
    assert process.stdout.readline().startswith("one")
    process.stdout.close()
    process.stdin.write("two\n")
    process.stdin.close()
    with process.stderr as stderr:
        err = stderr.read()
    assert process.wait(WATCHDOG_S) == 1
    assert "Traceback" not in err


def test_without_standard_input_there_is_no_message(studio: Server, tmp_path: Path) -> None:
    command = ["sh", "-c", 'exec "$@" <&-', "sh", *PROGRAM, "--url", studio.url]
    done = subprocess.run(command, env=environment(tmp_path), cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_local_pipeline_is_served_for_the_conversation(tmp_path: Path) -> None:
    code, out, err = pipe(tmp_path, "hello\n/model\n/quit\nnever sent\n", "echo", "--commands")
    assert (code, out) == (0, "hello\n"), err
    assert "* echo" in err


def test_a_spoken_question_and_a_spoken_answer(studio: Server, recording: Callable[..., bytes], tmp_path: Path) -> None:
    question = tmp_path / "question.wav"
    question.write_bytes(recording())
    code, out, err = pipe(tmp_path, f"/audio {question}\n", "--url", studio.url, "--commands", "-o", str(tmp_path))
    assert code == 0, err
    assert out.strip(), "what was attached is sent at the end of the input"
    samples, rate = soundfile.read(tmp_path / "answer-1.wav")
    assert rate == 24_000
    assert len(samples) > 0
    assert "s of speech" in err


def test_a_player_gets_the_sound_that_is_written(studio: Server, tmp_path: Path) -> None:
    """The player is a program of the name that the command looks for, on a PATH of its own."""
    programs = tmp_path / "bin"
    programs.mkdir()
    player = programs / "aplay"
    player.write_text(f"#!/bin/sh\nexec /bin/cat > {tmp_path}/played\n")
    player.chmod(0o755)
    arguments = ("--url", studio.url, "--play", "-o", str(tmp_path))
    code, _, err = pipe(tmp_path, "hello\n", *arguments, PATH=str(programs))
    assert code == 0, err
    written, _ = soundfile.read(tmp_path / "answer-1.wav", dtype="int16")
    played = np.frombuffer((tmp_path / "played").read_bytes(), np.int16)
    assert len(played) == len(written) > 0
    assert int(np.abs(played.astype(int) - written).max()) <= 1
    code, _, err = pipe(tmp_path, "hello\n", *arguments, PATH="/nowhere")
    assert code == 2
    assert "--play needs a player" in err


def test_what_fails_is_one_line_and_the_conversation_goes_on(studio: Server, tmp_path: Path) -> None:
    lines = "/nonsense\n/audio nowhere.wav\n/audio setup.py\n/model other\n/save /no/such/place\nhello\n"
    code, out, err = pipe(tmp_path, lines, "--url", studio.url, "--commands")
    assert (code, out) == (1, "hellohellohello\n")
    assert [line.partition(":")[0] for line in err.splitlines()][:2] == [
        "there is no command /nonsense; /help lists them",
        "nowhere.wav",
    ]
    assert "Traceback" not in err
    code, out, err = pipe(tmp_path, "hello\n", "--url", studio.url, "--model", "other")
    assert (code, out) == (1, "\n")
    assert "other" in err


def test_a_file_that_makes_the_request_too_large_is_refused_where_it_is_attached(
    gallery: Gallery, tmp_path: Path
) -> None:
    """Two pictures are larger than the server's limit, 32 MiB. One was sent already, and goes with each message."""
    first, second, saved = tmp_path / "first.png", tmp_path / "second.png", tmp_path / "talk.json"
    first.write_bytes(image_file(Image.new("RGB", (8, 8))) + bytes(13 * 2**20))
    second.write_bytes(first.read_bytes())
    lines = f"/image {first}\none\n/image {second}\ntwo\n/detach\n/image {second}\nthree\n/save {saved}\n"
    code, _, err = pipe(tmp_path, lines, "--url", gallery.server.url, "--commands", COLUMNS="1000")
    assert code == 1
    refusal = f"{second}: 34.7 MiB would be sent with it, of at most 31.0 MiB"
    assert [each for each in err.splitlines() if "next message" not in each] == [
        f"{refusal}; attached already: first.png (17.3 MiB); /detach drops the files and keeps the text",
        "dropped: first.png (17.3 MiB)",
        f"saved: {saved}",
    ]
    asked = [each["content"] for each in json.loads(saved.read_text())["messages"] if each["role"] == "user"]
    assert asked[:2] == ["[image_url] one", "two"], "both were answered"
    assert [each["type"] for each in asked[2]] == ["image_url", "text"]


@pytest.mark.parametrize("where", [["--url", "URL"], ["echo"]], ids=["server", "local"])
def test_a_file_is_refused_by_the_size_that_is_sent(where: list[str], studio: Server, tmp_path: Path) -> None:
    """24 MiB are 32 MiB in base64, which leaves no room for the rest of a request."""
    sound = tmp_path / "sound.wav"
    sound.write_bytes(bytes(24 * 2**20))
    arguments = [each.replace("URL", studio.url) for each in where]
    code, out, err = pipe(tmp_path, f"/audio {sound}\nhello\n", *arguments, "--commands", COLUMNS="1000")
    assert (code, out.strip().removesuffix("hellohello")) == (1, "hello")
    assert f"{sound}: 32.0 MiB would be sent with it, of at most 31.0 MiB" in err


def test_after_a_refusal_by_the_server_the_files_can_be_dropped(
    studio: Server, recording: Callable[..., bytes], tmp_path: Path
) -> None:
    """The limit of this server is lower than the command's."""
    sounds = [tmp_path / "first.wav", tmp_path / "second.wav"]
    for path in sounds:
        path.write_bytes(recording(seconds=15))
    files = "first.wav (0.6 MiB), second.wav (0.6 MiB)"
    lines = f"/audio {sounds[0]}\none\n/audio {sounds[1]}\ntwo\n/detach\nthree\n/detach\n"
    code, out, err = pipe(tmp_path, lines, "--url", studio.url, "--commands", COLUMNS="1000")
    assert code == 1
    assert out.endswith("threethreethree\n")
    assert [each for each in err.splitlines() if "next message" not in each] == [
        "the body is larger than 1000000 bytes (status 413)",
        f"sent with each message: {files}; /detach drops the files and keeps the text",
        f"dropped: {files}",
        "no file is attached",
    ]


def test_a_server_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    code, out, err = pipe(tmp_path, "hello\n", "--url", "http://127.0.0.1:1")
    assert (code, out) == (1, "")
    assert err.startswith("Error: http://127.0.0.1:1: the connection failed: Connection refused")
    assert len(err.splitlines()) == 1


def test_a_key_is_needed_where_the_server_has_one(slow: Server, tmp_path: Path) -> None:
    code, _, err = pipe(tmp_path, "hello\n", "--url", slow.url)
    assert code == 1
    assert "status 401" in err
    code, _, err = pipe(tmp_path, "/model\n", "--url", slow.url, "--commands", OMNI_ACTORS_API_KEY="sesame")
    assert (code, err.strip()) == (0, "* studio")


def test_ctrl_c_stops_the_answer_and_not_the_program(slow: Server, terminal: Callable[..., pexpect.spawn[str]]) -> None:
    child = terminal("--url", slow.url, "--api-key", "sesame")
    child.expect("/help lists the commands")
    child.expect(PROMPT)
    child.send("hello\r")
    child.expect("hellohello")
    aborted = slow.aborted()
    child.sendintr()
    child.expect("stopped")
    until(lambda: slow.aborted() == aborted + 1, "the server to abort the request")
    child.expect(PROMPT)
    child.send("unfinished")
    child.sendintr()
    child.expect("Ctrl-D or /quit ends")
    child.expect(PROMPT)
    child.send("/stats\r")
    child.expect("1 answer, ")
    child.expect(PROMPT)
    child.sendeof()
    assert exit_code(child) == 0


def test_history_several_lines_and_a_byte_that_is_no_text_at_the_prompt(
    studio: Server, terminal: Callable[..., pexpect.spawn[str]], tmp_path: Path
) -> None:
    child = terminal("--url", studio.url)
    child.expect(PROMPT)
    child.send("one\\\rtwo\r")
    child.expect("one\r\ntwoone\r\ntwoone\r\ntwo")
    child.expect(PROMPT)
    child.send("\x1b[A")  # arrow up: the message before
    child.send("!\r")
    child.expect("one\r\ntwo!one")
    child.expect(PROMPT)
    os.write(child.child_fd, b"a\xff\r")
    child.expect("a\ufffd" * 3)
    child.expect(PROMPT)
    child.send("/quit\r")
    assert exit_code(child) == 0
    history = tmp_path / "state" / "omni_actors" / "chat_history"
    assert "+one\n+two\n" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600


def test_without_a_place_for_the_history_the_prompt_works(
    studio: Server, terminal: Callable[..., pexpect.spawn[str]], tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("a file where the directory should be")
    child = terminal("--url", studio.url)
    child.expect("your messages are not kept for later: ")
    child.expect(PROMPT)
    child.send("hello\r")
    child.expect("hellohellohello")
    child.expect(PROMPT)
    child.send("\x1b[A")  # arrow up: the message before, of this conversation
    child.send("!\r")
    child.expect("hello!hello!hello!")
    child.expect(PROMPT)
    child.sendeof()
    assert exit_code(child) == 0


def test_a_signal_at_the_prompt_restores_the_terminal(
    studio: Server, terminal: Callable[..., pexpect.spawn[str]]
) -> None:
    child = terminal("--url", studio.url)
    child.expect(PROMPT)
    child.kill(signal.SIGTERM)
    child.expect("interrupted")
    assert exit_code(child) == 130


def test_a_terminal_that_goes_away_ends_the_conversation(studio: Server, tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    variables = environment(tmp_path, TERM="xterm", PROMPT_TOOLKIT_NO_CPR="1", NO_COLOR="1")
    command = [*PROGRAM, "--url", studio.url]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=variables, cwd=ROOT)
    os.close(theirs)
    drawn = b""
    while not re.search(PROMPT.encode(), drawn):
        drawn += os.read(ours, 4096)
    os.close(ours)
    _, err = process.communicate(timeout=WATCHDOG_S)
    assert (process.returncode, err.decode().count("\n")) == (0, 1), err.decode()


def test_control_characters_of_an_answer_do_not_reach_the_terminal(studio: Server, tmp_path: Path) -> None:
    code, out, _ = pipe(tmp_path, "a\x1b]0;title\x07b\x9bm\tc\n", "--url", studio.url)
    assert (code, out) == (0, 3 * "a]0;titlebm\tc" + "\n")


def test_an_interrupted_pipe_ends_with_130_and_leaves_no_worker(start: Start, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*PROGRAM, "echo"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tmp_path),
        cwd=ROOT,
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("hello\n")
        process.stdin.flush()
        assert process.stdout.readline() == "hello\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(WATCHDOG_S) == 130
