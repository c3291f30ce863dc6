"""A request's files, from wherever they may come: its own body, folders, hosts; and what they count for."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from omni_actors.serve.access.admission import AdmissionControl, AdmissionTicket
from omni_actors.serve.http.errors import HTTPError
from omni_actors.serve.media import base64_data
from omni_actors.serve.media.base64_data import from_base64, to_base64
from omni_actors.serve.media.folders import AllowedFolders
from omni_actors.serve.media.loader import LOAD_TIMEOUT_S, MAX_FILES, MediaLoader, MediaReference

PIXELS = bytes(range(200))
PLACE = "messages[0].content[1].image_url.url"


def ticket(max_bytes: int = 1000, of_all: int = 4000) -> AdmissionTicket:
    return AdmissionControl(lambda: 0, lambda: 1, max_requests=9, max_bytes=of_all, max_request_bytes=max_bytes).admit()


def image(url: str) -> MediaReference:
    return MediaReference("image", url, PLACE)


async def bring(media: MediaLoader, *references: MediaReference, into: AdmissionTicket | None = None) -> list[bytes]:
    with trio.fail_after(60):
        return await media.load(references, into or ticket())


async def refusal(
    media: MediaLoader, reference: MediaReference, into: AdmissionTicket | None = None
) -> tuple[str | None, str]:
    """Return the code and the message of the error, and check that it names the file's position."""
    with pytest.raises(HTTPError) as caught:
        await bring(media, reference, into=into)
    assert (caught.value.status, caught.value.param) == (400, reference.param)
    assert caught.value.message.startswith(f"{reference.param}: ")
    return caught.value.code, caught.value.message


def data_url(data: bytes, head: str = "image/png") -> str:
    return f"data:{head};base64,{to_base64(data)}"


# in the request


@pytest.mark.parametrize("head", ["image/png", "IMAGE/JPEG", "image/svg+xml", "image/png;charset=utf-8"])
async def test_a_data_url_of_an_image(head: str) -> None:
    assert await bring(MediaLoader(), image(data_url(PIXELS, head))) == [PIXELS]


async def test_files_of_all_kinds_come_in_order() -> None:
    video = MediaReference(
        "video", data_url(b"frames", "video/mp4").replace("data", "DATA").replace("base64", "Base64"), "v"
    )
    sound = MediaReference("audio", to_base64(b"sound"), "a")
    assert await bring(MediaLoader(), video, sound, image(data_url(PIXELS))) == [b"frames", b"sound", PIXELS]


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("data:", "invalid_image_url"),
        ("data:,", "invalid_image_url"),
        ("data:image/png,AAAA", "invalid_image_url"),
        ("data:image/png;base64", "invalid_image_url"),
        ("data:base64,AAAA", "invalid_image_url"),
        ("data:image/png;base64;x,AAAA", "invalid_image_url"),
        (f"data:image/png;{'x' * 300};base64,AAAA", "invalid_image_url"),
        ("data:;base64,AAAA", "unsupported_image_media_type"),
        ("data:video/mp4;base64,AAAA", "unsupported_image_media_type"),
        ("data:text/html;base64,AAAA", "unsupported_image_media_type"),
        ("data:image;base64,AAAA", "unsupported_image_media_type"),
        ("data:image/png;base64,AAA", "invalid_base64"),
        ("data:image/png;base64,AA A", "invalid_base64"),
        ("data:image/png;base64,AA-_", "invalid_base64"),
        ("data:image/png;base64,AAAÄ", "invalid_base64"),
        ("data:image/png;base64,", "empty_image_file"),
        ("", "invalid_image_url"),
        ("AAAA", "invalid_image_url"),
        ("/etc/passwd", "invalid_image_url"),
        ("ftp://example.org/a.png", "invalid_image_url"),
        ("gopher://127.0.0.1:25/_x", "invalid_image_url"),
        ("unix:///run/docker.sock", "invalid_image_url"),
        ("javascript:alert(1)", "invalid_image_url"),
        ("x" * 100_000, "invalid_image_url"),
        # where nothing is allowed
        ("https://example.org/a.png", "invalid_image_url"),
        ("http://localhost/a.png", "invalid_image_url"),
        ("file:///etc/passwd", "image_file_not_found"),
    ],
)
async def test_a_url_that_brings_nothing(url: str, code: str) -> None:
    assert (await refusal(MediaLoader(), image(url)))[0] == code


async def test_a_code_names_the_kind() -> None:
    reference = MediaReference("video", "https://example.org/a.mp4", "messages[0].content[0].video_url.url")
    assert (await refusal(MediaLoader(), reference))[0] == "invalid_video_url"


@pytest.mark.parametrize("size", [0, 1, 2, 3, 3 << 18, (3 << 18) + 1, (6 << 18) - 1, 6 << 18])
async def test_base64_is_decoded_in_pieces_to_the_same(size: int) -> None:
    data = os.urandom(size)
    assert await from_base64("begin," + to_base64(data), "p", len("begin,")) == data


@pytest.mark.parametrize("text", ["AAAA", "AAAAAA==", "AAAAAAA=", "AAAAAAAA", "AAAAAAAAAA==", "AAAAAAAAAAAAAAA="])
async def test_padding_at_the_end(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base64_data, "_PIECE", 8)
    assert await from_base64(text, "p") == bytes(len(text) // 4 * 3 - text.count("="))


@pytest.mark.parametrize(
    "text", ["A", "AAA", "AAAAAAA=AAAA", "AAAAAA==AAAA", "AAAAAA==AAAAAA==", "AAAA=AAA", "AAAAAAAA===="]
)
async def test_padding_anywhere_else(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a piece ends with it."""
    monkeypatch.setattr(base64_data, "_PIECE", 8)
    with pytest.raises(HTTPError, match="not base64"):
        await from_base64(text, "p")


async def test_others_are_served_while_a_large_file_is_decoded() -> None:
    text, turns, done = to_base64(bytes(6 << 20)), 0, False

    async def other() -> None:
        nonlocal turns
        while not done:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await from_base64(text, "p")
        done = True
    assert turns >= 7


async def test_no_more_files_than_a_request_may_bring() -> None:
    url = data_url(b"x")
    assert len(await bring(MediaLoader(), *[image(url)] * MAX_FILES)) == MAX_FILES
    with pytest.raises(HTTPError, match=f"may have {MAX_FILES}") as caught:
        await bring(MediaLoader(), *[image(url)] * (MAX_FILES + 1))
    assert (caught.value.param, caught.value.code) == ("messages", "too_many_files")


# in folders


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
    assert await bring(media, image(f"file://{link}/a.png"), image(f"file://{shelf}/a.png")) == [PIXELS, PIXELS]


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


# what they count for


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
    admission = AdmissionControl(lambda: 0, lambda: 6.2, max_requests=9, max_bytes=1000, max_request_bytes=900)
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


# from hosts


Host = Callable[[Callable[[trio.SocketStream], Any]], Any]


@pytest.fixture
def host(nursery: trio.Nursery) -> Host:
    """Start a server on loopback; gives its port."""

    async def start(serve: Callable[[trio.SocketStream], Any]) -> int:
        [listener] = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        port: int = listener.socket.getsockname()[1]
        return port

    return start


def reachable(port: int) -> MediaLoader:
    return MediaLoader([f"localhost:{port}"], may_connect=lambda address: address.is_loopback)


async def answer(stream: trio.SocketStream, body: bytes) -> None:
    await stream.receive_some()
    await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


async def test_files_are_fetched_some_at_a_time(host: Host) -> None:
    """Four of them; the fifth when one of these is here."""
    may_answer, inside, most = trio.Event(), 0, 0

    async def serve(stream: trio.SocketStream) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if most == 4:
            await trio.testing.wait_all_tasks_blocked(0.01)
            may_answer.set()
        await may_answer.wait()
        inside -= 1
        await answer(stream, b"x" * 7)

    port = await host(serve)
    into = ticket()
    files = await bring(reachable(port), *[image(f"http://localhost:{port}/{n}.png") for n in range(10)], into=into)
    assert (files, into.bytes, most) == ([b"x" * 7] * 10, 70, 4)


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"])
async def test_a_host_that_goes_to_sleep_is_given_up(
    host: Host, sent: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    ended = trio.Event()

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(sent)
        assert await stream.receive_some() == b""
        ended.set()

    autojump_clock.autojump_threshold = 0.2  # loopback is quicker
    port = await host(serve)
    began = trio.current_time()
    with pytest.raises(HTTPError, match=f"within {LOAD_TIMEOUT_S:g} s") as caught:
        await reachable(port).load([image(f"http://localhost:{port}/a.png")], ticket())
    assert caught.value.code == "files_too_slow"
    assert trio.current_time() - began == pytest.approx(LOAD_TIMEOUT_S, abs=1)
    autojump_clock.autojump_threshold = float("inf")
    with trio.fail_after(60):
        await ended.wait()


async def test_a_refused_file_cancels_the_others(host: Host) -> None:
    ended = trio.Event()

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        bad.set()
        assert await stream.receive_some() == b""
        ended.set()

    bad = trio.Event()
    port = await host(serve)
    references: Sequence[MediaReference] = [
        image(f"http://localhost:{port}/a.png"),
        MediaReference("image", "data:,", "other"),
    ]

    class Late(MediaLoader):
        async def _read(self, reference: MediaReference, ticket: AdmissionTicket) -> bytes:
            if reference.param == "other":
                await bad.wait()
            return await super()._read(reference, ticket)

    late = Late([f"localhost:{port}"], may_connect=lambda address: address.is_loopback)
    with pytest.raises(HTTPError) as caught:
        await bring(late, *references)
    assert caught.value.param == "other"
    with trio.fail_after(60):
        await ended.wait()


async def test_a_fetched_file_is_cut_where_the_request_is_full(host: Host) -> None:
    async def serve(stream: trio.SocketStream) -> None:
        try:
            await answer(stream, bytes(10_000_000))
        except trio.BrokenResourceError:
            cut.set()

    cut = trio.Event()
    port = await host(serve)
    into = ticket(100_000, 1_000_000)
    code, _ = await refusal(reachable(port), image(f"http://localhost:{port}/a.png"), into)
    assert code == "image_file_too_large"
    assert into.bytes <= 100_000
    with trio.fail_after(60):
        await cut.wait()
