"""What is measured on a device: serving at several loads, recovery, copies between rings and the device, and memory."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import trio

from bench.gpu.checkpoints import FAMILIES, Family, Saved
from bench.recovery import kill
from omni_actors import OmniSystem, config
from omni_actors.config import Pipeline
from omni_actors.generation import Generation
from ringbuf import Ring

Row = dict[str, Any]
PROMPT = "please tell me a long story about the sea , and of the people who live there ."
CONTEXT = 4096
COPY_BYTES = (1 << 20, 16 << 20, 64 << 20)
COPIES = 20
GPU_TESTS = "tests/ringbuf", "tests/stages/test_tensors.py", "tests/stages/test_cuda_memory.py"
TALKER_TOP_K = 16
"""The weights are random, and the end of speech has a logit of 0. About half of the 64 codes have more, so the end is
not among the 16 most likely ones."""
KILL_AFTER = 4
"""Pieces of text."""
ENDLESS = 2048
"""Tokens of an answer whose thinker is killed: even a tiny model is still at it then. It is aborted afterwards."""


def pipeline(name: str, saved: Saved, device: str, most: int, *, standby: int = 0) -> Pipeline:
    """Return the shipped pipeline of a family on one device. most: requests at a time. standby: of the thinker."""
    family = FAMILIES[name]
    options: Row = {"dtype": "bfloat16" if device.startswith("cuda") else "float32"}
    batched = {**options, "max_batch": most, "context": CONTEXT}
    changes: Row = {
        "model": str(saved.directory),
        "limits.max_requests": most,
        "stages.thinker.standby": standby,
        "stages.thinker.share_devices": True,
    }
    for stage, its_options in {"thinker": batched, "talker": batched}.items():
        changes |= {f"stages.{stage}.options.{key}": value for key, value in its_options.items()}
    for stage in ("thinker", "talker", family.decoder):
        changes |= {f"stages.{stage}.device": device, f"stages.{stage}.threads": 1}
    return config.load(family.pipeline, changes)


async def serving(
    name: str, saved: Saved, device: str, loads: Iterable[int], tokens: int, found: list[Row], keep: Callable[[], None]
) -> None:
    """Add a row to ``found`` for each load: so many requests at once, each of which makes ``tokens`` tokens and frames.

    The row of the first load gets the recoveries, which are measured last. keep: called after each figure.
    """
    family, rows = FAMILIES[name], list[Row]()
    counts = sorted(loads)
    began = time.monotonic()
    async with OmniSystem.open(pipeline(name, saved, device, counts[-1])) as omni:
        load_s = time.monotonic() - began
        await _answer(omni, tokens)  # what a first request waits for is not measured
        for count in counts:
            began, answers = time.monotonic(), list[Row]()

            async def ask(answers: list[Row] = answers) -> None:
                answers.append(await _answer(omni, tokens))

            async with trio.open_nursery() as nursery:
                for _ in range(count):
                    nursery.start_soon(ask)
            row = _row(family, answers, time.monotonic() - began, tokens)
            rows.append({"model": name, "at once": count, "load_s": load_s, **row})
            found.append(rows[-1])
            keep()
        rows[0]["recovery_s"] = await _recovery(omni)
        keep()
    async with OmniSystem.open(pipeline(name, saved, device, counts[-1], standby=1)) as omni:
        rows[0]["standby_recovery_s"] = await _recovery(omni)
        keep()


async def _answer(omni: OmniSystem, tokens: int) -> Row:
    answer = omni.generate(
        PROMPT,
        modalities=("text", "audio"),
        max_tokens=tokens,
        talker_max_tokens=tokens + 1,
        talker_top_k=TALKER_TOP_K,
    )
    metrics = (await answer.collect()).metrics
    assert metrics is not None, "it is complete"
    assert metrics.audio_s, "the talker chose the end of its speech first"
    return {
        "ttft_s": metrics.ttft_s,
        "ttfa_s": metrics.ttfa_s,
        "audio_s": metrics.audio_s,
        "total_s": metrics.total_s,
        "thinker_s": _busy_s(metrics, "thinker"),
        "talker_s": _busy_s(metrics, "talker"),
    }


def _busy_s(metrics: Any, stage: str) -> float:
    """Return the seconds from a stage's first input to its end."""
    times = metrics.stages[stage]
    return float(times.finished_s - times.first_input_s)


def _row(family: Family, answers: list[Row], took_s: float, tokens: int) -> Row:
    """Return rates of all answers together, and medians of their times."""
    median = {key: statistics.median(answer[key] for answer in answers) for key in answers[0]}
    audio_s = sum(answer["audio_s"] for answer in answers)
    return {
        "tokens/s": tokens * len(answers) / max(answer["thinker_s"] for answer in answers),
        "frames/s": audio_s / family.frame_s / max(answer["talker_s"] for answer in answers),
        "ttft_s": median["ttft_s"],
        "ttfa_s": median["ttfa_s"],
        "rtf": median["total_s"] / median["audio_s"],
        "audio seconds/s": audio_s / took_s,
    }


async def _recovery(omni: OmniSystem) -> float:
    """Return the seconds from a SIGKILL of the thinker in the middle of an answer to the next piece of text."""
    await omni.wait_ready()
    answer: Generation = omni.generate(PROMPT, modalities=("text",), max_tokens=ENDLESS)
    count, killed_at = 0, None
    async for output in answer:
        count += isinstance(output.delta, str)
        if killed_at is None and count == KILL_AFTER:
            killed_at = time.monotonic()
            kill(omni, answer, "thinker")
        elif killed_at is not None and answer.stream.request.replays:
            answer.abort()
            return time.monotonic() - killed_at
    raise RuntimeError(f"the answer ended after {count} pieces of text without a replay")


def copies(device: str) -> list[Row]:
    """Return the rates of copies between a ring and the device, in bytes per second, and of pinned memory beside it.

    Without a CUDA device all are copies in host memory. Those to and from memory that torch has pinned are what the
    machine can do.
    """
    cuda = device.startswith("cuda")
    rows = list[Row]()
    for size in COPY_BYTES:
        with Ring.create(4 * size) as ring:
            if cuda:
                ring.register_cuda()
            producer, consumer = ring.claim_producer(), ring.claim_consumer()
            there = torch.zeros(size, dtype=torch.uint8, device=device)
            host = torch.zeros(size, dtype=torch.uint8, pin_memory=cuda)
            out_s, in_s, to_pinned_s, from_pinned_s = (list[float]() for _ in range(4))
            for _ in range(COPIES):
                space = producer.try_reserve(size)
                assert space is not None, "the ring is empty"
                into = torch.frombuffer(space[:], dtype=torch.uint8)
                out_s.append(_timed(into, there, cuda=cuda))
                del into
                producer.commit()
                with consumer.recv() as frame:
                    arrived = torch.frombuffer(frame.data[:], dtype=torch.uint8)
                    in_s.append(_timed(there, arrived, cuda=cuda))
                    del arrived
                to_pinned_s.append(_timed(host, there, cuda=cuda))
                from_pinned_s.append(_timed(there, host, cuda=cuda))
        rates = {
            "to the ring": out_s,
            "to pinned memory": to_pinned_s,
            "from the ring": in_s,
            "from pinned memory": from_pinned_s,
        }
        rows.append({"bytes": size} | {name: size / statistics.median(values) for name, values in rates.items()})
    return rows


def _timed(target: torch.Tensor, source: torch.Tensor, *, cuda: bool) -> float:
    began = time.perf_counter()
    target.copy_(source, non_blocking=True)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def free_bytes(device: str) -> int | None:
    """Return the free memory of a CUDA device, as a process of its own sees it; None on the CPU."""
    if not device.startswith("cuda"):
        return None
    program = f"import torch; print(torch.cuda.mem_get_info({device!r})[0])"
    return int(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout)


def tests(root: Path) -> str:
    """Run the tests of rings, copies and handles with the mark ``gpu``, and return pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *GPU_TESTS]
    ended = subprocess.run(command, cwd=root, check=False, capture_output=True, text=True)
    lines = ended.stdout.strip().splitlines() or [f"pytest ended with code {ended.returncode}"]
    return lines[-1]
