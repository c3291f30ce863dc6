"""Files in the allowed folders, and what they count for."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.media.folders import AllowedFolders
from omni_actors.serve.media.loader import LOAD_TIMEOUT_S, MediaLoader
from tests.serve.media.loading import PIXELS, PLACE, bring, image, refusal, ticket
from tests.support.admission import admission_control
from tests.support.open_descriptors import open_descriptors


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A folder that is allowed, beside one that is not; in both, files and what may be taken for one."""
    for name in ("open", "closed", "open-too"):
        folder = tmp_path / name
        (folder / "below").mkdir(parents=True)
        (folder / "a.png").write_bytes(PIXELS)
        (folder / "below" / "b c%é.png").write_bytes(PIXELS[:100])
    shelf = tmp_path / "open"
    (shelf / "empty.png").touch()
    (shelf / "to-inside").symlink_to("below/b c%é.png")
    (shelf / "to-outside").symlink_to(tmp_path / "closed" / "a.png")
    (shelf / "up").symlink_to("..")
    (shelf / "to-nowhere").symlink_to("nothing")
    (shelf / "loop").symlink_to("loop")
    (shelf / "system").symlink_to("/proc/self")
    os.mkfifo(shelf / "pipe")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(shelf / "socket"))
    return shelf


@pytest.mark.parametrize(
    ("path", "size"),
    [
        ("/a.png", 200),
        ("/below/b%20c%25%C3%A9.png", 100),
        ("/below/b%20c%25é.png", 100),
        ("/below/../a.png", 200),
        ("/./below//../a.png", 200),
        ("/to-inside", 100),
        ("/up/open/a.png", 200),
        ("/../open/a.png", 200),
    ],
)
@pytest.mark.parametrize("scheme", ["file://", "FILE://localhost", "file:"])
async def test_a_file_in_an_allowed_folder(shelf: Path, path: str, size: int, scheme: str) -> None:
    assert await bring(MediaLoader(folders=[shelf]), image(f"{scheme}{shelf}{path}")) == [PIXELS[:size]]


async def test_a_folder_may_be_given_by_a_link_and_be_asked_for_by_both_names(shelf: Path) -> None:
    link = shelf.parent / "link"
    link.symlink_to(shelf)
    media = MediaLoader(folders=[link])
    before = open_descriptors()
    assert await bring(media, image(f"file://{link}/a.png"), image(f"file://{shelf}/a.png")) == [PIXELS, PIXELS]
    assert (await refusal(media, image(f"file://{link}/to-outside")))[0] == "image_file_not_found"
    assert open_descriptors() == before


@pytest.mark.parametrize(
    "path",
    [
        # elsewhere
        *("/to-outside", "/up/closed/a.png", "/up/open-too/a.png", "/system/environ", "/../closed/a.png"),
        *("/below/../../closed/a.png", "/%2e%2e/closed/a.png", "/..%2fclosed/a.png", "-too/a.png"),
        *("/../../../../../../../../etc/passwd", "/below/b%20c%25%C3%A9.png/../../../closed/a.png"),
        # not a file
        *("", "/", "/below", "/below/", "/a.png/", "/pipe", "/socket", "/to-nowhere", "/loop", "/nothing", "/up"),
        *("/a.png%00", "/a.png%00.jpg", f"/{'x' * 300}", f"/{'x/' * 3000}"),
    ],
)
async def test_a_path_that_must_not_be_read(shelf: Path, path: str) -> None:
    """All errors are equal, so that a client learns nothing about the machine."""
    code, message = await refusal(MediaLoader(folders=[shelf]), image(f"file://{shelf}{path}"))
    assert code == "image_file_not_found"
    assert message == f"{PLACE}: the file does not exist, or this server may not read it"


@pytest.mark.parametrize("path", ["/etc/passwd", "/proc/self/environ", "/dev/zero", "/", "etc/passwd", "."])
async def test_a_path_elsewhere_is_not_looked_up(shelf: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    really, opened = os.open, []

    def note(path: Any, *rest: Any) -> int:
        opened.append(path)
        return really(path, *rest)

    monkeypatch.setattr(os, "open", note)
    media = MediaLoader(folders=[shelf])
    assert (await refusal(media, image(f"file:{path}")))[0] == "image_file_not_found"
    await bring(media, image(f"file://{shelf}/a.png"))
    assert opened == [f"{shelf}/a.png"]


@pytest.mark.parametrize(
    "url", ["file://example.org{}/a.png", "file://{}/a.png?x", "file://{}/a.png#x", "file://127.0.0.1{}/a.png"]
)
async def test_a_file_url_is_a_path_and_nothing_else(shelf: Path, url: str) -> None:
    assert (await refusal(MediaLoader(folders=[shelf]), image(url.format(shelf))))[0] == "invalid_image_url"


async def test_a_path_that_is_swapped_after_the_check_is_not_read(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interleaving: it is a file of the folder when it is judged, and a link out of it when it is read."""
    path, judge = shelf / "a.png", os.fstat

    def swap(fd: int) -> os.stat_result:
        found = judge(fd)
        path.unlink()
        path.symlink_to(shelf.parent / "closed" / "secret")
        return found

    (shelf.parent / "closed" / "secret").write_bytes(b"s" * 200)
    monkeypatch.setattr(os, "fstat", swap)
    assert await bring(MediaLoader(folders=[shelf]), image(f"file://{path}")) == [PIXELS]
    assert path.read_bytes() == b"s" * 200


async def test_an_empty_file(shelf: Path) -> None:
    assert (await refusal(MediaLoader(folders=[shelf]), image(f"file://{shelf}/empty.png")))[0] == "empty_image_file"


def test_a_folder_that_is_none(shelf: Path) -> None:
    for path in (shelf / "nothing", shelf / "a.png"):
        with pytest.raises(ValueError, match="is not a folder"):
            MediaLoader(folders=[path])


async def test_a_disk_that_hangs_is_given_up(
    shelf: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    may_go_on, left = threading.Event(), threading.Event()

    def hang(*_: Any) -> bytes:
        may_go_on.wait(60)
        left.set()
        return b""

    monkeypatch.setattr(AllowedFolders, "_read", hang)
    with pytest.raises(HTTPError, match=f"within {LOAD_TIMEOUT_S:g} s") as caught:
        await MediaLoader(folders=[shelf]).load([image(f"file://{shelf}/a.png")], ticket())
    assert (caught.value.status, caught.value.code) == (400, "files_too_slow")
    may_go_on.set()
    assert left.wait(60)


async def test_a_file_counts_as_the_body_does(shelf: Path) -> None:
    """Against the request's own limit, together with its body and the other files; one byte decides."""
    media, both = MediaLoader(folders=[shelf]), [image(f"file://{shelf}/a.png"), image(f"file://{shelf}/to-inside")]
    into = ticket(1000)
    into.add_bytes(700)
    assert [len(file) for file in await bring(media, *both, into=into)] == [200, 100]
    assert into.bytes == 1000
    into = ticket(1000)
    into.add_bytes(801)
    code, message = await refusal(media, both[0], into)
    assert code == "image_file_too_large"
    assert "larger than 1000 bytes" in message


async def test_files_share_the_budget_of_all_that_arrive(shelf: Path) -> None:
    admission = admission_control(max_bytes=1000, max_request_bytes=900)
    other, into = admission.admit(), admission.admit()
    other.add_bytes(850)
    with pytest.raises(HTTPError) as caught:
        await bring(MediaLoader(folders=[shelf]), image(f"file://{shelf}/a.png"), into=into)
    assert (caught.value.status, caught.value.code, caught.value.headers["retry-after"]) == (429, "overloaded", "7")
    other.release()
    await bring(MediaLoader(folders=[shelf]), image(f"file://{shelf}/a.png"), into=into)
    assert admission.bytes == 200


async def test_a_file_that_is_large_is_not_read(shelf: Path) -> None:
    with (shelf / "large.png").open("wb") as file:
        file.truncate(1 << 40)
    assert (await refusal(MediaLoader(folders=[shelf]), image(f"file://{shelf}/large.png")))[
        0
    ] == "image_file_too_large"
