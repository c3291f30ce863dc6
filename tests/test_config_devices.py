"""Which devices each worker gets: a table of layouts, a table of refusals, and properties of all layouts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_actors import config
from omni_actors.config import Stage, models
from omni_actors.config.devices import (
    Device,
    DeviceLayoutError,
    Layout,
    configured_devices,
    layout,
    stage_layout,
    visible_devices,
)
from omni_actors.errors import ConfigError
from tests.support.open_descriptors import few_descriptors

LAYOUTS: dict[str, tuple[list[Device], int, int, list[str] | None, bool, Layout]] = {
    # case: (devices, workers, per worker, visible, shared, layout)
    "one worker": ([0], 1, 1, None, False, (("0",),)),
    "no worker": ([0, 1], 0, 1, None, False, ()),
    "a pool": ([3, 1], 2, 1, None, False, (("3",), ("1",))),
    "a pool of pairs": ([0, 1, 2, 3], 2, 2, None, False, (("0", "1"), ("2", "3"))),
    "a pool with room": ([0, 1, 2, 3], 1, 2, None, False, (("0", "1"),)),
    "a pool of visible devices": ([1, 0], 2, 1, ["5", "7"], False, (("7",), ("5",))),
    "a pool of names": (["GPU-1", "MIG-1"], 2, 1, ["5"], False, (("GPU-1",), ("MIG-1",))),
    "a template": ([0], 3, 1, None, False, (("0",), ("1",), ("2",))),
    "a template of a pair": ([2, 3], 2, 2, None, False, (("2", "3"), ("4", "5"))),
    "a template of visible devices": ([1], 2, 1, ["0", "GPU-9", "4"], False, (("GPU-9",), ("4",))),
    "a template of a name": (["GPU-1"], 1, 1, None, False, (("GPU-1",),)),
    "a shared template": ([0], 2, 1, ["6"], True, (("6",), ("6",))),
    "a shared template of a name": (["GPU-1"], 2, 1, None, True, (("GPU-1",), ("GPU-1",))),
    "a shared pool": ([0, 0, 1], 3, 1, None, True, (("0",), ("0",), ("1",))),
    "places with several digits": ([1, 11, 111], 3, 1, None, False, (("1",), ("11",), ("111",))),
}
REFUSED: dict[str, tuple[list[Device], int, int, list[str] | None, bool, str]] = {
    # case: (devices, workers, per worker, visible, shared, reason)
    "a pool that is too small": ([0, 1], 3, 1, None, False, "no room for 3 workers"),
    "no multiple": ([0, 1, 2], 1, 2, None, False, "no room for 1 workers with 2 each"),
    "fewer than one share": ([0], 1, 2, None, False, "no room"),
    "not visible": ([1], 1, 1, ["7"], False, "only 1 devices are visible"),
    "the last worker's is not visible": ([0], 3, 1, ["0", "1"], False, "only 2 devices are visible"),
    "none visible": ([0], 1, 1, [], False, "only 0 devices are visible"),
    "names cannot be shifted": (["GPU-1"], 2, 1, None, False, "cannot be shifted"),
    "places and names": ([0, "GPU-1"], 2, 1, None, False, "cannot be mixed"),
    "twice in a pool": ([0, 0], 2, 1, None, False, "share_devices"),
    "twice in a worker": ([0, 0], 1, 2, None, True, "one worker"),
    "the beginning of a name": (["GPU-12", "GPU-1"], 2, 1, None, False, "share_devices"),
    "shifted onto another worker": ([0, 2], 2, 2, None, False, "share_devices"),
    "one device has two visible places": ([0, 1], 2, 1, ["3", "3"], False, "share_devices"),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts(case: str) -> None:
    devices, workers, per_worker, visible, shared, expected = LAYOUTS[case]
    assert layout(devices, workers, per_worker, visible=visible, shared=shared) == expected


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_has_both_lengths_that_would_fit(case: str) -> None:
    devices, workers, per_worker, visible, shared, reason = REFUSED[case]
    with pytest.raises(DeviceLayoutError, match=reason) as caught:
        layout(devices, workers, per_worker, visible=visible, shared=shared)
    assert f"a pool of {workers * per_worker}" in str(caught.value)
    assert f"a template of {per_worker}" in str(caught.value)
    assert (caught.value.devices, caught.value.workers) == (tuple(devices), workers)


places = st.lists(st.integers(0, 12), max_size=12)
names = st.lists(st.sampled_from(["GPU-1", "GPU-12", "GPU-2", "MIG-1", "MIG-2"]), max_size=6)
visible_names = st.none() | st.lists(
    st.sampled_from([*map(str, range(12)), "GPU-1", "MIG-1"]), max_size=12, unique=True
)


@given(st.one_of(places, names), st.integers(0, 6), st.integers(1, 4), visible_names, st.booleans())
def test_layouts_do_not_overlap_and_are_in_range(
    devices: list[Device], workers: int, per_worker: int, visible: list[str] | None, shared: bool
) -> None:
    arguments = (devices, workers, per_worker)
    try:
        found = layout(*arguments, visible=visible, shared=shared)
    except DeviceLayoutError:
        return
    assert found == layout(*arguments, visible=visible, shared=shared)
    assert [len(each) for each in found] == [per_worker] * workers
    assert all(len(set(each)) == per_worker for each in found)
    taken = list(itertools.chain(*found))
    assert shared or len(set(taken)) == len(taken)
    if visible is not None:
        assert {name for name in taken if name not in devices} <= {*visible}
    if workers:
        assert layout(devices, workers - 1, per_worker, visible=visible, shared=shared) == found[:-1]


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 5), st.integers(0, 30))
def test_a_template_and_the_pool_that_it_stands_for_are_one_layout(
    workers: int, per_worker: int, first: int, visible: int
) -> None:
    seen = [f"GPU-{number:04}" for number in range(visible)]
    template, pool = range(first, first + per_worker), range(first, first + workers * per_worker)
    try:
        expected = layout(pool, workers, per_worker, visible=seen)
    except DeviceLayoutError:
        assert first + workers * per_worker > visible
        return
    assert layout(template, workers, per_worker, visible=seen) == expected


@pytest.mark.parametrize(
    ("variable", "present", "expected"),
    [
        (None, 0, None),
        (None, 2, ("0", "1")),
        ("", 2, ()),
        ("2, GPU-1", 0, ("2", "GPU-1")),
        ("1,-1,0", 2, ("1",)),
        ("1,,0", 2, ("1",)),
    ],
)
def test_visible_devices(variable: str | None, present: int, expected: tuple[str, ...] | None) -> None:
    assert visible_devices(variable, present) == expected


def test_a_single_device_is_the_first_of_a_template() -> None:
    assert configured_devices(Stage(engine="echo", device="cuda")) == (0,)
    assert configured_devices(Stage(engine="echo", device="cuda:2", devices_per_replica=2)) == (2, 3)
    assert configured_devices(Stage(engine="echo", device="xpu:1")) == ()
    assert stage_layout(Stage(engine="echo"), 2, visible=[]) == ((), ())


def test_a_stage_that_begins_without_replicas_may_list_any_pool() -> None:
    listed = {"device": "cuda", "devices": [0, 1, 2, 3], "devices_per_replica": 2, "replicas": 0}
    stage = config.load("echo", {f"stages.first.{key}": value for key, value in listed.items()}).stages["first"]
    assert stage_layout(stage, stage.workers, visible=None) == ()
    assert stage_layout(stage, stage.workers_for(2), visible=None) == (("0", "1"), ("2", "3"))


@pytest.mark.parametrize(
    ("stage", "path", "accepted"),
    [
        ({"device": "cuda", "devices": [0, 1, 2], "standby": 1}, "devices", "a pool of 2 (2 workers with 1 each), or"),
        ({"device": "cuda", "devices": [0, 1, 2, 3], "replicas": 3}, "devices", "or a template of 1"),
        ({"device": "cuda", "devices": [0, 1, 2], "devices_per_replica": 2, "replicas": 0}, "devices", "template of 2"),
        ({"device": "cuda", "devices": [0, 0], "replicas": 2}, "devices", "share_devices: true allows it"),
        ({"device": "cuda", "devices": ["gpu"]}, "devices[0]", "matching regex"),
        ({"devices": [0]}, "devices", "unless the stage has device: cuda (it has 'cpu')"),
        ({"devices_per_replica": 2}, "devices_per_replica", "1, for any device but CUDA's"),
        ({"env": {"A=B": "1"}}, "", "matching regex"),
        ({"env": {"A": 1}}, "env", "text"),
        ({"device": "cuda", "env": {"CUDA_VISIBLE_DEVICES": "1"}}, "env.CUDA_VISIBLE_DEVICES", "devices, from which"),
    ],
)
def test_a_file_whose_devices_do_not_fit_is_refused(stage: dict[str, object], path: str, accepted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load("echo", {f"stages.first.{key}": value for key, value in stage.items()})
    assert caught.value.path.startswith(f"stages.first.{path}".rstrip("."))
    assert accepted in caught.value.accepted


def test_devices_are_unknown_without_a_free_descriptor() -> None:
    with few_descriptors():
        assert models.cuda_devices() == 0
