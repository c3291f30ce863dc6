"""A worker that spans several devices uses them all."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from omni_actors.stages.base import StageContext
from omni_actors.stages.vllm.arguments import WrongEngineArgument, parallel

CONTEXT = StageContext(stage="llm", model=None, options={}, threads=1, device="cuda:0", report=print)


@pytest.mark.parametrize(
    ("devices", "given", "tensor"),
    [
        (1, {}, 1),
        (2, {}, 2),
        (4, {"pipeline_parallel_size": 2}, 2),
        (2, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}, 1),
    ],
)
def test_tensor_parallelism_follows_from_the_devices(devices: int, given: dict[str, Any], tensor: int) -> None:
    context = msgspec.structs.replace(CONTEXT, device_count=devices)
    assert parallel(context, given) == {**given, "tensor_parallel_size": tensor}


@pytest.mark.parametrize(
    ("devices", "given"),
    [(1, {"tensor_parallel_size": 2}), (2, {"tensor_parallel_size": 1}), (2, {"pipeline_parallel_size": 3})],
)
def test_another_number_of_devices_is_refused(devices: int, given: dict[str, Any]) -> None:
    with pytest.raises(WrongEngineArgument, match=f"devices_per_replica, {devices}"):
        parallel(msgspec.structs.replace(CONTEXT, device_count=devices), given)


def test_on_the_cpu_nothing_is_changed() -> None:
    given = {"tensor_parallel_size": 2}
    assert parallel(msgspec.structs.replace(CONTEXT, device="cpu"), given) == given
