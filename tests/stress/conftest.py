"""What the tests of the harness share: the baseline's answers, and pipelines with a planted bug in an engine."""

from __future__ import annotations

import gc
import textwrap
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from omni_actors import config as configuration
from omni_actors.stress import leaks
from omni_actors.stress.run import ask_oracle
from omni_actors.stress.workload import Workload, workload_of
from tests.stress.patience import PATIENT

ENGINES = """
    import pathlib
    import subprocess

    from omni_actors.stages.base import StageOutput
    from omni_actors.stages.echo.engine import EchoEngine


    def context_without(context):
        return type(context)(context.stage, None, {"step_s": 0.001}, 1, "cpu", context.report)


    class Planted(EchoEngine):
        # ``again``: whether this is not the first worker of its stage.
        def __init__(self, context):
            super().__init__(context_without(context))
            marker = pathlib.Path(context.options["marker"])
            self.again = marker.exists()
            marker.touch()


    class Louder(Planted):
        # Another sound after a restart.
        def step(self):
            for output in super().step():
                if self.again and "audio" in output.tensors:
                    sound = output.tensors["audio"].numpy() * 2
                    tensors = {**output.tensors, "audio": sound}
                    output = StageOutput(output.request_id, tensors, output.data, output.last)
                yield output


    class Stutters(Planted):
        # What comes first comes twice after a restart.
        def __init__(self, context):
            super().__init__(context)
            self.seen = set()

        def step(self):
            for output in super().step():
                if self.again and output.request_id not in self.seen and not output.last:
                    self.seen.add(output.request_id)
                    yield output
                yield output


    class Mute(Planted):
        # Takes requests after a restart, and never answers.
        @property
        def busy(self):
            return super().busy and not self.again


    class Faint(Planted):
        # Dies of itself, once.
        def step(self):
            if not self.again:
                raise SystemExit(7)
            yield from super().step()


    class Hasty(Planted):
        # Takes new weights while requests run.
        def _update_weights(self, files, version):
            return {"updated": 0, "complete": True}


    class Daemon(Planted):
        # Starts a process that outlives it.
        def __init__(self, context):
            super().__init__(context)
            if self.again:
                quiet = subprocess.DEVNULL
                subprocess.Popen(["sleep", "300"], stdout=quiet, stderr=quiet, start_new_session=True)
"""


@pytest.fixture(scope="module", autouse=True)
def what_is_there_already_is_no_garbage() -> None:
    """Each run collects garbage, twice: it takes a quarter of a second where tests before have loaded torch."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def baseline() -> Workload:
    """echo's workload with its answers."""
    workload = workload_of("echo", PATIENT)
    ask_oracle(workload)
    return workload


@pytest.fixture
def planted(baseline: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Workload]:
    """echo's workload, on a pipeline whose second stage has the engine of this name."""
    (tmp_path / "planted_engines.py").write_text(textwrap.dedent(ENGINES))
    monkeypatch.syspath_prepend(tmp_path)

    def plant(engine: str) -> Workload:
        overrides = {
            "stages.second.engine": f"planted_engines:{engine}",
            "stages.second.deterministic": True,
            "stages.second.options": {"marker": str(tmp_path / engine)},
        }
        patience_s = 1.0 if engine == "Mute" else baseline.patience_s  # only a mute engine keeps the harness waiting
        return replace(baseline, pipeline=configuration.load(baseline.pipeline, overrides), patience_s=patience_s)

    return plant


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """Mark the processes of this test alone; return the mark."""
    name = uuid.uuid4().hex
    monkeypatch.setenv(leaks.MARKER, name)
    return name
