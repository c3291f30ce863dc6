"""Named rings: names, opening, strangers' entries, and deaths at every step."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

import ringbuf
from ringbuf import PeerDied, Ring, RingCorrupted, RingNameRefused, RingNameTaken, RingNotFound, WrongGeneration
from ringbuf._claim import claim_word_of
from ringbuf._names import SHM, RingName, parse_name, publish
from tests.ringbuf.descriptors import descriptors
from tests.support.open_descriptors import few_descriptors

ROOT = Path(ringbuf.__file__).parent.parent
LABEL = f"test-{os.getpid()}"
CAPACITY = 16 << 10

LABELS = st.text("azAZ09_-", min_size=1, max_size=64)
NAMES = st.builds(
    RingName,
    pid_namespace=st.integers(0, 2**64 - 1),
    creator=st.integers(1, 2**22 - 1).flatmap(lambda pid: st.integers(0, 2**42 - 1).map(lambda at: at << 22 | pid)),
    fds=st.tuples(*[st.integers(0, 2**31 - 1)] * 3),
    generation=st.integers(0, 2**64 - 1),
    label=LABELS,
)


@pytest.fixture(autouse=True)
def no_name_left() -> Iterator[None]:
    yield
    Ring.sweep_named()
    assert not entries()


def entries() -> list[str]:
    return [entry for entry in os.listdir(SHM) if LABEL in entry]


@contextmanager
def process(script: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", f"import os, sys\nfrom ringbuf import *\nLABEL = {LABEL!r}\n{script}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


@contextmanager
def entry(name: RingName) -> Iterator[Path]:
    """An entry that this process made by itself."""
    path = Path(SHM, str(name))
    path.touch()
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def named_like(ring: Ring, **changes: object) -> RingName:
    name = parse_name(str(ring.name))
    assert name is not None
    return RingName(**{**vars(name), **changes})  # type: ignore[arg-type]


@given(NAMES)
def test_a_name_is_parsed_into_what_it_was_written_from(name: RingName) -> None:
    assert parse_name(str(name)) == name
    assert len(str(name)) <= 255


@given(NAMES, st.integers(0, 300), st.text("ringbuf.-/\n٣019afAF", max_size=2))
def test_any_other_text_is_no_name(name: RingName, place: int, change: str) -> None:
    text = str(name)[:place] + change + str(name)[place + 1 :]
    parsed = parse_name(text)
    assert parsed is None or str(parsed) == text


@pytest.mark.parametrize("label", ["", "a.b", "a/b", "ä", "x" * 65, "a\n"])
def test_an_invalid_label_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match="a label is"):
        Ring.create_named(label)
    with pytest.raises((ValueError, RingNotFound)):
        Ring.open(label)


@pytest.mark.parametrize("whole", [False, True])
def test_another_process_opens_a_ring_by_its_name_and_the_name_is_gone(whole: bool) -> None:
    with Ring.create_named(LABEL, CAPACITY, checksums=True) as ring:
        assert entries() == [ring.name]
        script = "ring = Ring.open(sys.stdin.readline().strip()); ring.claim_producer().send(b'from outside')"
        with process(script) as child:
            consumer = ring.claim_consumer()
            child.communicate(ring.name if whole else LABEL)
            with consumer.recv(timeout=30) as frame:
                assert frame.data == b"from outside"
            assert not entries()
            with pytest.raises(PeerDied):
                consumer.recv(timeout=30)
        with pytest.raises(RingNotFound):
            Ring.open(LABEL)


async def test_the_bells_of_a_named_ring_wake_both_ends() -> None:
    with Ring.create_named(LABEL, 4096) as ring, Ring.open(LABEL) as twin:
        producer, consumer = ring.claim_producer(), twin.claim_consumer()
        message = bytes(3 * 4096)
        received = []

        async def receive() -> None:
            while len(received) < 20:
                if (frame := consumer.try_recv()) is not None:
                    received.append(bytes(frame.data))
                    frame.release()
                elif consumer.park():
                    await trio.lowlevel.wait_readable(consumer.fileno())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            for _ in range(20):
                for _ in producer.sending(message):
                    await trio.lowlevel.wait_readable(producer.fileno())
                await trio.lowlevel.checkpoint()
        assert received == [message] * 20


def test_a_label_has_one_ring_at_a_time() -> None:
    with Ring.create_named(LABEL, CAPACITY) as ring:
        before = descriptors()
        with pytest.raises(RingNameTaken) as caught:
            Ring.create_named(LABEL, CAPACITY)
        assert caught.value.pids == (os.getpid(),)
        assert entries() == [ring.name]
        assert descriptors() == before
    assert not entries()
    Ring.create_named(LABEL, CAPACITY).close()


def test_two_rings_of_one_label_are_told_apart_by_their_names() -> None:
    with Ring.create_named(LABEL, CAPACITY) as ring, entry(named_like(ring, pid_namespace=1)):
        with pytest.raises(RingNameTaken):
            Ring.open(LABEL)
        Ring.open(str(ring.name)).close()
        assert len(entries()) == 2  # nothing is known of another pid namespace


def test_closing_removes_the_creators_name_and_not_the_openers() -> None:
    with Ring.create_named(LABEL, CAPACITY) as ring:
        with process("Ring.open(LABEL).close()") as child:
            assert child.wait(30) == 0
        assert entries() == [ring.name]
    assert not entries()
    with pytest.raises(RingNotFound):
        Ring.open(str(ring.name))


def test_an_unclaimed_end_is_as_dead_as_the_creator() -> None:
    with process("ring = Ring.create_named(LABEL); print(flush=True); input()") as child:
        assert child.stdout is not None
        child.stdout.readline()
        with Ring.open(LABEL) as ring:
            consumer = ring.claim_consumer()
            child.kill()
            with pytest.raises(PeerDied) as caught:
                consumer.recv(timeout=30)
            assert caught.value.pid == child.pid
            assert Ring.sweep_named() == [ring.name]


def test_a_ring_is_closed_without_a_free_descriptor() -> None:
    ring = Ring.create_named(LABEL, CAPACITY)
    with few_descriptors():
        ring.close()
        assert not Path(SHM, str(ring.name)).exists()
    assert ring.closed


def test_a_recycled_pid_is_not_the_creator() -> None:
    with Ring.create_named(LABEL, CAPACITY) as ring:
        word = claim_word_of(os.getpid())
        assert word is not None
        with entry(recycled := named_like(ring, creator=word - (1 << 22), label=f"{LABEL}-2")):
            with pytest.raises(RingNotFound):
                Ring.open(f"{LABEL}-2")
            assert not Path(SHM, str(recycled)).exists()
        assert entries() == [ring.name]


def test_a_name_that_its_process_forgot_is_swept() -> None:
    with process("ring = Ring.create_named(LABEL); os.execl('/bin/cat', 'cat')") as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write("ready\n")
        child.stdin.flush()
        assert child.stdout.readline() == "ready\n"
        assert len(Ring.sweep_named()) == 1


def other_owner(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root gives a file away")
    os.chown(path, 12345, -1)


ODD_ENTRIES: dict[str, Callable[[Path], object]] = {
    "with contents": lambda path: path.write_bytes(b"mine"),
    "of another user": other_owner,
    "a symbolic link": lambda path: (path.unlink(), path.symlink_to("/dev/null")),
}


@pytest.mark.parametrize("spoil", ODD_ENTRIES.values(), ids=ODD_ENTRIES.keys())
def test_a_strangers_entry_is_refused_and_left_alone(spoil: Callable[[Path], object]) -> None:
    with Ring.create_named(LABEL, CAPACITY) as ring, entry(name := named_like(ring, label=f"{LABEL}-2")) as path:
        spoil(path)
        with pytest.raises(RingNameRefused) as caught:
            Ring.open(str(name))
        assert caught.value.name == str(name)
        with pytest.raises(RingNotFound):
            Ring.open(f"{LABEL}-2")
        assert os.path.lexists(path)


def test_a_text_of_another_form_is_refused() -> None:
    with pytest.raises(RingNameRefused):
        Ring.open("ringbuf.what")


@pytest.mark.parametrize("spoiled", ["magic", "capacity", "generation", "a bell", "memory"])
def test_a_name_that_leads_to_no_ring_is_a_clear_error(spoiled: str) -> None:
    with Ring.create_named(LABEL, CAPACITY) as ring, Ring.create(CAPACITY) as other:
        fds, generation = ring.fds, ring.generation
        error: type[Exception] = RingNotFound
        if spoiled == "capacity":
            ring._segment.words[2] += 4096
            error = RingCorrupted
        elif spoiled == "a bell":
            fds = (fds[0], other.fds[1], fds[2])
        elif spoiled == "memory":
            fds = (fds[1], fds[1], fds[2])
        elif spoiled == "generation":
            generation += 1
        else:
            ring._segment.words[0] = 1
        name = publish(f"{LABEL}-2", fds, generation)
        before = descriptors()
        with pytest.raises(error):
            Ring.open(str(name))
        assert descriptors() == before
        Path(SHM, str(name)).unlink(missing_ok=True)


def test_descriptors_that_mean_another_ring_by_now_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The creator closes its ring and makes another one while a process opens the first."""
    ring = Ring.create_named(LABEL, CAPACITY)
    attach = Ring.attach

    def attach_late(fds: list[int], *, generation: int) -> Ring:
        return attach(fds, generation=generation + 1)

    monkeypatch.setattr(Ring, "attach", attach_late)
    with ring, pytest.raises(WrongGeneration):
        Ring.open(LABEL)

    def attach_after_close(fds: list[int], *, generation: int) -> Ring:
        ring.close()
        return attach(fds, generation=generation + 1)

    ring = Ring.create_named(LABEL, CAPACITY)
    monkeypatch.setattr(Ring, "attach", attach_after_close)
    with pytest.raises(RingNotFound):
        Ring.open(LABEL)


def test_of_processes_that_create_one_label_at_a_time_at_most_one_has_it(tmp_path: Path) -> None:
    holding = tmp_path / "holding"
    script = f"""
print(flush=True); input()
for _ in range(100):
    try:
        ring = Ring.create_named(LABEL, 4096)
    except RingNameTaken:
        continue
    os.close(os.open({str(holding)!r}, os.O_CREAT | os.O_EXCL))
    os.unlink({str(holding)!r})
    ring.close()
"""
    with process(script) as first, process(script) as second:
        for child in (first, second):
            assert child.stdout is not None
            child.stdout.readline()
        for child in (first, second):
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        assert first.wait(60) == second.wait(60) == 0


def killed(stride: int) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.ringbuf.named_death_scripts", str(stride)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = ast.literal_eval(done.stdout)
    return found


def test_no_name_survives_a_death_at_some_steps() -> None:
    assert all(count > 2 for count in killed(19).values())


@pytest.mark.exhaustive
def test_no_name_survives_a_death_at_any_step() -> None:
    assert all(count > 50 for count in killed(1).values())
