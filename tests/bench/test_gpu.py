"""The benchmark of a device runs whole on the CPU, with tiny models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bench.gpu import checkpoints, handover
from bench.gpu.__main__ import main

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_the_same_code_runs_on_the_cpu_with_tiny_models(tmp_path: Path) -> None:
    files = {"--json": tmp_path / "figures.json", "--markdown": tmp_path / "tables.md"}
    command = [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--tiny"]
    for option, file in files.items():
        command += [option, str(file)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(files["--json"].read_text())
    assert {(row["model"], row["at once"]) for row in found["serving"]} == {
        (name, count) for name in checkpoints.FAMILIES for count in (1, 2)
    }
    for row in found["serving"]:
        assert all(row[key] > 0 for key in ("tokens/s", "frames/s", "ttft_s", "ttfa_s", "rtf", "load_s"))
    for way in ("recovery_s", "standby_recovery_s"):
        assert sum(way in row for row in found["serving"]) == len(checkpoints.FAMILIES)
    assert [row["at once"] for row in found["pictures"]] == [1, 2]
    assert all(row[way] > 0 for row in found["handovers"] for way in handover.WAYS)
    assert all(row["steps/s"] > 0 for row in found["pictures"])
    assert files["--markdown"].read_text().count("\n| qwen3 ") == 2


@pytest.mark.slow
def test_as_many_layers_as_the_budget_allows_in_the_real_proportion() -> None:
    for family in checkpoints.FAMILIES.values():
        assert checkpoints._affordable(family, 10**12) == (family.thinker_layers, family.talker_layers)
        with pytest.raises(ValueError, match="more than the budget"):
            checkpoints._affordable(family, 10**9)
    thinker, talker = checkpoints._affordable(checkpoints.FAMILIES["qwen3"], 12 * 10**9)
    assert checkpoints.LEAST_LAYERS <= thinker < 48
    assert talker == 20 * thinker // 48


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_the_command_names_what_works() -> None:
    ended = CliRunner().invoke(main, [])
    assert ended.exit_code == 2
    assert "torch sees no CUDA device for cuda:0; try --device cpu --tiny" in ended.output
