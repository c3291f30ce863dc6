"""The command. Each family's checkpoint is made, served at each load, and deleted, one after the other.

Everything runs on one device. The figures are of random weights: they show what the stages and the runtime take, not
how good an answer is. With ``--tiny`` the same code runs on small models anywhere.
"""

from __future__ import annotations

import functools
import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import click
import torch
import trio
from rich.console import Console

from bench.gpu import checkpoints, handover, measure, pictures
from bench.gpu.measure import Row

LOADS, PICTURE_LOADS = (1, 8, 32), (1, 4)
TINY_LOADS, TINY_TOKENS = (1, 2), 24
SHARE = 0.4
"""The share of the free memory that the weights may take. Caches, activations and three CUDA contexts take the rest."""
HEADINGS = {
    "model": "model",
    "at once": "requests at once",
    "tokens/s": "thinker, tokens/s",
    "frames/s": "talker, frames/s",
    "ttft_s": "TTFT, s",
    "ttfa_s": "TTFA, s",
    "rtf": "RTF",
    "audio seconds/s": "seconds of sound per second",
    "load_s": "load, s",
    "recovery_s": "SIGKILL of the thinker to the next text, s",
    "standby_recovery_s": "the same with a standby, s",
}
PICTURE_HEADINGS = {"at once": "pictures at once", "steps/s": "denoising steps/s", "picture_s": "a picture, s"}


def run(device: str, *, tiny: bool, tokens: int, most_bytes: int, keep: Callable[[Row], None]) -> Row:
    """Measure everything and return the figures. keep: called with those so far after each part."""
    found: Row = {
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU",
        "tests": measure.tests(Path(__file__).parents[2]),
        "copies": measure.copies(device),
        "handovers": handover.handovers(device, measure.COPY_BYTES[: 1 if tiny else None]),
        "serving": [],
        "checkpoints": {},
    }
    _release(device)
    before = measure.free_bytes(device)  # beside this process, whose context on the device stays
    found["memory"] = {"free before": before}
    keep(found)
    budget = None if tiny else min(most_bytes, int(SHARE * before) if before is not None else most_bytes)
    for name in checkpoints.FAMILIES:
        with tempfile.TemporaryDirectory() as directory:
            saved = checkpoints.save(name, Path(directory), budget, device)
            _release(device)
            found["checkpoints"][name] = {"layers": saved.layers, "bytes": saved.weights_bytes}
            loads = TINY_LOADS if tiny else LOADS
            keep_all = functools.partial(keep, found)
            trio.run(measure.serving, name, saved, device, loads, tokens, found["serving"], keep_all)
    with tempfile.TemporaryDirectory() as directory:
        found["checkpoints"]["qwen_image"] = {"layers": pictures.save(Path(directory), budget, device)}
        _release(device)
        loads = TINY_LOADS if tiny else PICTURE_LOADS
        found["pictures"] = trio.run(functools.partial(pictures.serving, Path(directory), device, loads, is_tiny=tiny))
    found["memory"]["free after"] = measure.free_bytes(device)
    keep(found)
    return found


def _release(device: str) -> None:
    """Give the device's memory that this process no longer uses back to the workers."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def markdown(found: Row) -> str:
    """Return the figures as tables."""
    lines = [f"Device: {found['device']}. GPU tests of rings, copies and handles: {found['tests']}", ""]
    for name in checkpoints.FAMILIES:
        checkpoint = found["checkpoints"][name]
        thinker, talker = checkpoint["layers"]
        size = checkpoint["bytes"] / 1e9
        lines.append(f"- {name}: {thinker} layers of the thinker, {talker} of the talker, {size:.2f} GB of weights")
    lines.append(f"- qwen_image: {found['checkpoints']['qwen_image']['layers']} layers of the transformer")
    lines += ["", *_table(HEADINGS, found["serving"]), "", *_table(PICTURE_HEADINGS, found["pictures"]), ""]
    lines += [
        *_rates(found["copies"]),
        "",
        "From one process to another on the device:",
        "",
        *_rates(found["handovers"]),
    ]
    lines += ["", f"Device memory, bytes: {found['memory']}"]
    return "\n".join(lines)


def _rates(rows: list[Row]) -> list[str]:
    rates = [{key: value if key == "bytes" else value / 1e9 for key, value in row.items()} for row in rows]
    return _table({key: key if key == "bytes" else f"{key}, GB/s" for key in rates[0]}, rates)


def _table(headings: dict[str, str], rows: list[Row]) -> list[str]:
    def shown(value: object) -> str:
        return f"{value:,.3g}" if isinstance(value, float) else str("" if value is None else value)

    lines = ["| " + " | ".join(headings.values()) + " |", "|---" * len(headings) + "|"]
    return lines + ["| " + " | ".join(shown(row.get(key)) for key in headings) + " |" for row in rows]


@click.command()
@click.option("--device", default="cuda:0", show_default=True, help="A torch device.")
@click.option("--tiny", is_flag=True, help="Small models and loads: does everything work?")
@click.option("--tokens", default=128, show_default=True, help="Tokens, and frames, of each answer.")
@click.option("--most-gb", default=12.0, show_default=True, help="The largest checkpoint, whose making takes time.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here.")
@click.option("--markdown", "markdown_file", type=click.Path(path_type=Path), help="Write the tables here.")
def main(
    device: str, tiny: bool, tokens: int, most_gb: float, json_file: Path | None, markdown_file: Path | None
) -> None:
    """Measure the omni models with random weights on one device, and print tables."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise click.UsageError(f"torch sees no CUDA device for {device}; try --device cpu --tiny")

    def keep(found: Row) -> None:
        if json_file is not None:
            json_file.write_text(json.dumps(found, indent=1))

    tokens = min(tokens, TINY_TOKENS) if tiny else tokens
    found = run(device, tiny=tiny, tokens=tokens, most_bytes=int(most_gb * 1e9), keep=keep)
    Console(soft_wrap=True, highlight=False).print(markdown(found))
    if markdown_file is not None:
        markdown_file.write_text(markdown(found) + "\n")


if __name__ == "__main__":
    main()
