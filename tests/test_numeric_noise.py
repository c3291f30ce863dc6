"""The noise of `make test-portable` reaches every kernel that it is meant for, and repeats with the computation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from omni_actors import OmniSystem
from omni_actors.config import Pipeline, Stage

HOOKS = Path(__file__).parent / "support" / "process_hooks"
KERNELS = """
import json
import numpy as np
import torch
from torch.nn import functional

draw = torch.Generator().manual_seed(0)
x, w = torch.rand(3, 8, generator=draw), torch.rand(5, 8, generator=draw)
layer = torch.nn.Linear(8, 5, bias=False)
layer.weight.data = w
packed = torch.ops.mkldnn._reorder_linear_weight(w, 3)
q = torch.rand(1, 2, 4, 8, generator=draw)
kernels = {
    "linear": lambda: functional.linear(x, w),
    "layer": lambda: layer(x).detach(),
    "packed linear": lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""),
    "matmul": lambda: torch.matmul(x, w.T),
    "@": lambda: x @ w.T,
    "bmm": lambda: torch.bmm(q[0], q[0].mT),
    "convolution": lambda: torch.nn.functional.conv1d(q[0], torch.ones(3, 4, 2)),
    "attention": lambda: functional.scaled_dot_product_attention(q, q, q),
    "bfloat16": lambda: functional.linear(x.bfloat16(), w.bfloat16()),
    "rfft": lambda: torch.from_numpy(np.fft.irfft(np.fft.rfft(x.numpy()))),
}
print(json.dumps({name: [kernel().tolist(), kernel().tolist()] for name, kernel in kernels.items()}))
"""


def computed(seed: str) -> dict[str, list[list[float]]]:
    """By kernel: its result, twice."""
    environment = {**os.environ, "PYTHONPATH": str(HOOKS), "OMNI_ACTORS_TEST_NOISE": seed}
    found: dict[str, list[list[float]]] = json.loads(
        subprocess.run([sys.executable, "-c", KERNELS], env=environment, capture_output=True, check=True).stdout
    )
    return found


@pytest.mark.slow
@pytest.mark.voice
def test_every_kernel_is_noisy_by_a_few_units_in_the_last_place() -> None:
    import numpy as np

    plain, noisy, other = computed(""), computed("1"), computed("2")
    for name, (expected, _) in plain.items():
        first, again = noisy[name]
        assert first == again, f"{name}: the same computation gives other bits"
        assert first != expected, f"{name} has no noise"
        assert first != other[name][0], f"{name}: the seed makes no difference"
        np.testing.assert_allclose(first, expected, rtol=2**-6 if name == "bfloat16" else 1e-5)


async def test_workers_import_the_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HOOKS), os.environ.get("PYTHONPATH", "")]))
    stage = Stage(engine="tests.support.served_engines:Inside", accepts=("messages",), emits="text")
    async with OmniSystem.open(Pipeline(name="inside", stages={"only": stage})) as omni:
        text = "".join([out.delta async for out in omni.generate("hello") if isinstance(out.delta, str)])
    assert json.loads(text)["hooks"] == str(HOOKS / "sitecustomize.py")
