"""The checks of the libraries: which are installed, in which versions, and which devices torch sees."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import msgspec
from rich import filesize

from omni_actors import __version__
from omni_actors.cli.doctor.findings import Finding, error, ok, warning
from omni_actors.installed import is_importable

PROBE_TIMEOUT_S = 120.0
"""The first import of torch from a slow disk takes half a minute."""
ENGINE_LIBRARIES = {
    "torch": ("torch", "voice"),
    "transformers": ("transformers", "voice"),
    "faster-whisper": ("faster_whisper", "voice"),
    "onnxruntime": ("onnxruntime", "voice"),
    "diffusers": ("diffusers", "image"),
    "vllm": ("vllm", "vllm"),
}
"""Distribution: its import name, and the extra of omni-actors that installs it."""
PROBE = """\
import json, torch
count = torch.cuda.device_count()
kinds = [torch.cuda.get_device_properties(n) for n in range(count)]
print(json.dumps({"cuda": torch.version.cuda, "threads": torch.get_num_threads(),
                  "devices": [[each.name, each.total_memory] for each in kinds]}))
"""


class Probed(msgspec.Struct, frozen=True):
    """What torch says of this machine. cuda: the version of CUDA that it was built for. devices: (name, bytes)."""

    cuda: str | None
    threads: int
    devices: list[tuple[str, int]]


def check() -> Iterator[Finding]:
    """Yield the versions of the libraries, their deviations from the lock, and the devices."""
    yield ok("libraries", "omni-actors", __version__)
    for distribution, (module, extra) in ENGINE_LIBRARIES.items():
        yield _library(distribution, module, extra)
    yield _lock()
    if is_importable("torch"):
        yield from _devices()


def _library(distribution: str, module: str, extra: str) -> Finding:
    if not is_importable(module):
        remedy = f"for the engines of the extra: pip install '.[{extra}]' in the clone"
        return warning("libraries", distribution, "not installed", remedy)
    try:
        return ok("libraries", distribution, importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return ok("libraries", distribution, f"{module} of another distribution, or of a directory: version unknown")


def _lock() -> Finding:
    path = _lock_file()
    if path is None:
        remedy = "compare with requirements/constraints.txt of the source: this package comes without it"
        return warning("libraries", "lock", "not there", remedy)
    differing = []
    for name, locked in re.findall(r"^([\w.-]+)==(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE):
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of an extra that is not installed
        if installed.partition("+")[0] != locked:
            differing.append(f"{name} {installed} (tested: {locked})")
    if differing:
        remedy = f"pip install -c {path} '.[…]' in the clone"
        return warning("libraries", "lock", ", ".join(differing), remedy)
    return ok("libraries", "lock", "all installed packages have the tested versions")


def _lock_file() -> Path | None:
    """Return the lock: in a wheel inside the package, in a checkout beside it. None: a wheel of another builder."""
    package = Path(str(resources.files("omni_actors")))
    candidates = (package / "constraints.txt", package.parent / "requirements" / "constraints.txt")
    return next((path for path in candidates if path.is_file()), None)


def _devices() -> Iterator[Finding]:
    probed = probe()
    if isinstance(probed, str):
        yield error("libraries", "torch import", probed, "reinstall torch: pip install --force-reinstall")
        return
    if not probed.devices:
        built = f"torch is built for CUDA {probed.cuda}" if probed.cuda else "torch is built for the CPU"
        remedy = "none for pipelines on the CPU; a GPU needs its driver, and a torch that is built for CUDA"
        yield warning("libraries", "CUDA", f"no device; {built}", remedy)
    for number, (name, memory) in enumerate(probed.devices):
        yield ok("libraries", f"cuda:{number}", f"{name}, {filesize.decimal(memory)}, CUDA {probed.cuda}")


def probe() -> Probed | str:
    """Return what torch says of this machine, or why it cannot say it. torch runs in a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not imported within {PROBE_TIMEOUT_S:.0f} s"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Probed)
