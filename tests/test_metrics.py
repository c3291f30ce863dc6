"""The figures of an engine reach the metrics that a Prometheus server scrapes."""

from __future__ import annotations

import trio

from omni_actors import OmniSystem
from omni_actors.stages.echo.engine import EchoEngine


class Weighed(EchoEngine):
    """An engine with one figure. Workers import it by name."""

    def gauges(self) -> dict[str, float]:
        return {"weight": 1.5}


async def test_the_figures_of_an_engine_are_among_the_metrics() -> None:
    engine = "tests.test_metrics:Weighed"
    async with OmniSystem.open("echo", **{"stages.second.engine": engine}) as omni:
        with trio.fail_after(60.0):
            while b"omni_engine" not in omni.metrics.exposition():  # noqa: ASYNC110 - an answered ping has no event
                await trio.sleep(0.005)
        figures = [line for line in omni.metrics.exposition().decode().splitlines() if line.startswith("omni_engine")]
        assert figures == ['omni_engine{name="weight",replica="0",stage="second"} 1.5']


async def test_the_times_of_each_stage_are_histograms() -> None:
    options = {"fan_out": 3, "step_s": 0.01}
    async with OmniSystem.open("echo", **{"stages.second.options": options}) as omni:
        for _ in range(2):
            await omni.generate("hello", modalities=("text", "audio")).collect()

        def sample(name: str, **labels: str) -> float:
            value = omni.metrics.registry.get_sample_value(f"omni_{name}", labels)
            assert value is not None
            return value

        assert sample("queue_seconds_count") == 2
        for stage in ("first", "second"):
            assert sample("stage_queue_seconds_count", stage=stage) == 2
            assert sample("stage_first_output_seconds_count", stage=stage) == 2
        assert sample("stage_output_interval_seconds_count", stage="second") == 2 * (3 - 1), "each one, not a mean"
        assert sample("stage_output_interval_seconds_sum", stage="second") >= 2 * 0.01
        for edge in ({"producer": "client", "consumer": "first"}, {"producer": "first", "consumer": "second"}):
            assert sample("edge_transfer_seconds_count", **edge) == 2
            assert 0 <= sample("edge_transfer_seconds_sum", **edge) < 2 * 60
        intervals = "omni_stage_output_interval_seconds_count"
        assert omni.metrics.registry.get_sample_value(intervals, {"stage": "first"}) is None, "it has one output"
