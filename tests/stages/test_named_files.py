"""New weights on another node: its file has the path that the parent named, and may be a copy."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from omni_actors.errors import InvalidRequest
from omni_actors.stages.echo.weights import count_tensors
from omni_actors.stages.weights import Files, shapes

YEAR_2001_NS = 10**18


@pytest.mark.parametrize("read", [shapes, count_tensors])
def test_a_copy_is_the_named_file_if_it_keeps_the_time_of_the_last_change(
    tmp_path: Path, read: Callable[[Files], object]
) -> None:
    named, copy = tmp_path / "named.safetensors", tmp_path / "copy.safetensors"
    save_file({"name": torch.zeros(2)}, named)
    os.utime(named, ns=(YEAR_2001_NS, YEAR_2001_NS))
    files = {str(copy): (named.stat().st_size, named.stat().st_mtime_ns)}
    shutil.copyfile(named, copy)
    with pytest.raises(InvalidRequest, match=r"another copy.*cp -p, rsync -t") as refused:
        read(files)
    assert refused.value.param == "path"
    shutil.copy2(named, copy)
    assert read(files)
