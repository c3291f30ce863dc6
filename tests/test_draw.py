"""``omni-actors draw``, and pictures in a terminal. The engine needs no model (``tests.support.painting_engine``)."""

from __future__ import annotations

import base64
import io
import re
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image
from rich.console import Console

from omni_actors import Picture
from omni_actors.cli import main
from omni_actors.cli.terminal_pictures import CoarsePicture, inline_encoder, shows_coarse_pictures
from omni_actors.outputs import Output

drawing = import_module("omni_actors.cli.draw")  # its name in the package is the command
PIXELS = np.arange(12 * 40 * 3, dtype=np.uint8).reshape(12, 40, 3)


@pytest.fixture
def painting(tmp_path: Path) -> Path:
    path = tmp_path / "painting.yaml"
    path.write_text("""\
name: painting
stages:
  painter:
    engine: tests.support.painting_engine:PaintingEngine
    accepts: [messages, image]
    emits: image
    options: {size: 24x16}
""")
    return path


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["draw", *map(str, arguments)])


def test_several_pictures_are_numbered_and_have_their_seeds(painting: Path, tmp_path: Path) -> None:
    Image.fromarray(PIXELS).save(tmp_path / "in.png")
    result = invoke("a cat", "--pipeline", painting, "-o", tmp_path / "cat.png", "-n", 2, "--seed", 3, "--size", "32x8")
    assert result.exit_code == 0, result.output
    assert [path.name for path in sorted(tmp_path.glob("cat*"))] == ["cat-1.png", "cat-2.png"]
    assert [found[1] for found in re.finditer(r"seed (\d)", result.stderr)] == ["3", "4"]
    assert "cat-2.png: 32 × 8" in result.stderr.replace("\n", "")
    with Image.open(tmp_path / "cat-1.png") as first, Image.open(tmp_path / "cat-2.png") as second:
        assert first.size == (32, 8)
        assert first.tobytes() != second.tobytes()


@pytest.mark.slow
def test_a_video_that_is_larger_than_the_bound_is_made_as_fast_as_it_is_written(painting: Path, tmp_path: Path) -> None:
    """30 frames of 832 × 480 have 36 MB. At most 13 MB of them are on their way when the request pauses."""
    settings = ("limits.output_bytes=16000000", "stages.painter.options.frames=30")
    overrides = [argument for setting in settings for argument in ("-s", setting)]
    result = invoke("a cat", "--config", painting, "-o", tmp_path / "cat.png", "--size", "832x480", *overrides)
    assert result.exit_code == 0, result.output
    assert len(list(tmp_path.glob("cat*.png"))) == 30


def test_a_refused_prompt_ends_with_one_sentence(painting: Path, tmp_path: Path) -> None:
    result = invoke("unpaintable", "--config", painting, "-o", tmp_path / "cat.webp", "--image", painting)
    assert result.exit_code == 1
    assert "this prompt cannot be painted" in result.output
    assert not (tmp_path / "cat.webp").exists()


def test_a_picture_that_is_larger_than_its_format_allows_ends_with_one_sentence(painting: Path, tmp_path: Path) -> None:
    size = ("-s", "stages.painter.options.size=16384x8")
    result = invoke("a cat", "--config", painting, "-o", tmp_path / "cat.webp", *size)
    assert (result.exit_code, "Traceback" in result.output) == (1, False)
    assert "cannot be written: webp has at most 16383 pixels a side" in " ".join(result.output.split())


def test_an_answer_without_a_picture_is_a_failure(painting: Path, tmp_path: Path) -> None:
    result = invoke("colourless", "--config", painting, "-o", tmp_path / "cat.jpg")
    assert (result.exit_code, "no picture" in result.output) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-o", "cat.gif"), "accepted are .png"),
        (("-o", "cat"), "cat has no suffix"),
        (("-o", "/proc/cat.png"), "cannot be written"),
        (("-o", "nowhere/cat.png"), "no directory"),
        (("-n", "0"), "0 is not in the range"),
        (("-o", "cat.webp", "--size", "16384x16"), "webp has at most 16383 pixels a side"),
        (("-o", "cat.jpg", "--size", "16x65501"), "jpeg has at most 65500 pixels a side"),
        (("--image", "missing.png"), "does not exist"),
        (("--config", "missing.yaml"), "missing.yaml"),
    ],
)
def test_wrong_arguments_end_before_anything_starts(arguments: tuple[str, ...], words: str) -> None:
    result = invoke("a cat", *arguments)
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--size", "10"), "size: expected"),
        (("--strength", "2"), "strength: expected"),
        (("--steps", "100000"), "steps: expected"),
        (("-n", "64", "--size", "10"), "size: expected"),
        (("--config", "echo"), "unknown modalities 'image'"),
    ],
)
def test_a_wrong_request_ends_before_the_models_are_loaded(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def load(*_: object) -> None:
        raise AssertionError("the command waits for the models")

    monkeypatch.setattr(drawing, "wait_ready", load)
    result = invoke("a cat", "-o", tmp_path / "cat.png", *arguments)
    assert result.exit_code == 1
    assert words in result.stderr


def test_as_many_pictures_as_the_pipeline_admits_requests(painting: Path, tmp_path: Path) -> None:
    result = invoke("a cat", "--config", painting, "-o", tmp_path / "cat.png", "-n", 2, "-s", "limits.max_requests=2")
    assert result.exit_code == 0, result.output


def test_a_file_in_the_way_ends_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "cat-2.png").mkdir()
    result = invoke("a cat", "-o", tmp_path / "cat.png", "-n", 2)
    assert result.exit_code == 2
    assert "cannot be written: Is a directory" in " ".join(result.output.split())


def test_further_pictures_of_a_request_have_their_own_number() -> None:
    names = [drawing._numbered(Path("a.png"), 2, part, count).name for part, count in ((1, 1), (3, 1), (1, 4), (3, 4))]
    assert names == ["a.png", "a-3.png", "a-2.png", "a-2-3.png"]


# the terminal


def terminal(**more: object) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=60, height=20, **more)  # type: ignore[arg-type]


def test_a_coarse_picture_has_two_pixels_in_each_cell() -> None:
    console = terminal(color_system="truecolor")
    with console.capture() as captured:
        console.print(CoarsePicture(Picture(PIXELS), 40, 20))
    lines = captured.get().splitlines()
    assert len(lines) == 6
    assert all(line.count("▀") == 40 for line in lines)
    [first] = re.findall(r"38;2;(\d+);(\d+);(\d+);48;2;(\d+);(\d+);(\d+)m", lines[0])[:1]
    assert tuple(map(int, first)) == (*PIXELS[0, 0], *PIXELS[1, 0])


@pytest.mark.parametrize("shape", [(1, 500), (500, 1), (301, 300), (1, 1)])
def test_a_coarse_picture_fits(shape: tuple[int, int]) -> None:
    console = terminal(color_system="truecolor")
    with console.capture() as captured:
        console.print(CoarsePicture(Picture(np.zeros((*shape, 3), np.uint8)), 30, 10))
    lines = captured.get().splitlines()
    assert 1 <= len(lines) <= 10
    assert 1 <= lines[0].count("▀") <= 30


def test_only_terminals_with_true_colours_show_coarse_pictures() -> None:
    assert shows_coarse_pictures(terminal(color_system="truecolor"))
    assert not shows_coarse_pictures(terminal(color_system="256"))
    assert not shows_coarse_pictures(Console(file=io.StringIO(), color_system="truecolor"))


def test_terminals_with_a_protocol_get_the_whole_picture() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    assert inline_encoder({"TERM": "xterm-256color"}) is None
    for environment in ({"TERM": "xterm-kitty"}, {"KITTY_WINDOW_ID": "1"}):
        encode = inline_encoder(environment)
        assert encode is not None
        commands = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", encode(Picture(noise)))
        assert [keys[-1] for keys, _ in commands] == ["1"] * (len(commands) - 1) + ["0"]
        assert len(commands) > 1
        assert all(len(part) <= 4096 for _, part in commands)
        assert decoded("".join(part for _, part in commands)).tobytes() == noise.tobytes()
    for environment in ({"TERM_PROGRAM": "iTerm.app"}, {"LC_TERMINAL": "iTerm2"}):
        encode = inline_encoder(environment)
        assert encode is not None
        [part] = re.findall(r"\x1b\]1337;File=inline=1;size=\d+:(.*)\x07", encode(Picture(noise)))
        assert decoded(part).tobytes() == noise.tobytes()


def test_terminals_with_sixels_get_a_reduced_picture() -> None:
    encode = inline_encoder({"TERM": "foot"})
    assert encode is not None
    pixels = np.zeros((20, 30, 3), np.uint8)
    pixels[:, :10, 0], pixels[7:, 20:, 2] = 255, 255
    assert np.array_equal(sixels(encode(Picture(pixels))), pixels)
    noise = np.random.default_rng(0).integers(0, 256, (60, 960, 3), np.uint8)
    assert sixels(encode(Picture(noise))).shape == (30, 480, 3)


def sixels(written: str) -> np.ndarray:
    """Return the pixels that a terminal shows, uint8 (height, width, 3)."""
    head = re.fullmatch(r'\x1bPq"1;1;(\d+);(\d+)(.*)\x1b\\', written, re.DOTALL)
    assert head is not None
    width, height = int(head[1]), int(head[2])
    shown = np.zeros((-(-height // 6) * 6, width, 3), np.uint8)
    palette = {int(number): np.array([r, g, b], int) * 255 // 100 for number, r, g, b in COLOUR.findall(head[3])}
    for row, band in enumerate(COLOUR.sub("", head[3]).split("-")):
        for number, line in re.findall(r"#(\d+)([^#$]*)\$", band):
            whole = re.sub(r"!(\d+)(.)", lambda run: run[2] * int(run[1]), line)
            bits = np.frombuffer(whole.encode(), np.uint8) - 63
            for bit in range(6):
                shown[row * 6 + bit, (bits >> bit & 1).astype(bool)] = palette[int(number)]
    return shown[:height]


COLOUR = re.compile(r"#(\d+);2;(\d+);(\d+);(\d+)")


def decoded(encoded: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(encoded)))


@pytest.mark.parametrize("term", ["xterm-256color", "xterm-kitty"])
def test_the_display_shows_progress_and_pictures(monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    console = terminal(color_system="truecolor")
    monkeypatch.setattr(drawing, "notes", console)
    monkeypatch.setenv("TERM", term)
    for variable in ("TERM_PROGRAM", "LC_TERMINAL", "KITTY_WINDOW_ID"):
        monkeypatch.delenv(variable, raising=False)
    with drawing._Display(2) as display:
        display.show(output(None, 1))
        display.show(output(Picture(PIXELS, 2, 4, final=False), 2))
        display.show(output(Picture(PIXELS, 4, 4), 4))
    display.show_finished()
    assert isinstance(console.file, io.StringIO)
    written = console.file.getvalue()
    assert "picture 2" in written
    assert "2/4" in written
    assert "▀" in written
    assert ("\x1b_G" in written) == (term == "xterm-kitty")


def output(picture: Picture | None, step: int) -> Output:
    return Output(
        request_id="a",
        stage="painter",
        modality="image",
        delta=picture,
        finished=step == 4,
        data={"step": step, "total": 4},
        tensors={},
    )
