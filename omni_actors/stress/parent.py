"""Runs a pipeline until it is killed: ``python -m omni_actors.stress.parent loading|serving [NODES]``.

Reads the pipeline as JSON from stdin. Prints a line when its workers load, or when it serves requests.
"""

from __future__ import annotations

import sys
from functools import partial

import msgspec
import trio

from omni_actors.config import Pipeline
from omni_actors.stress.faults import RefusingSpawner
from omni_actors.stress.nodes import open_nodes
from omni_actors.stress.workload import Template, workload_of
from omni_actors.system import OmniSystem


async def run(pipeline: Pipeline, cluster: str | None, *, loading: bool) -> None:
    """Run until killed. cluster: see ``Workload``."""
    templates = [each for each in workload_of(pipeline, {}).templates.values() if "lora" not in each.params]
    async with (
        open_nodes(pipeline, cluster) as spawner,
        OmniSystem.open(pipeline, wait_ready=not loading, spawner=RefusingSpawner(spawner)) as omni,
        trio.open_nursery() as nursery,
    ):
        while not all(each.pid for stage in omni.health().stages.values() for each in stage):  # noqa: ASYNC110
            await trio.sleep(0.001)
        if not loading:
            for template in templates:
                nursery.start_soon(_submit_forever, omni, template)
        print("loading" if loading else "serving", flush=True)
        await trio.sleep_forever()


async def _submit_forever(omni: OmniSystem, template: Template) -> None:
    while True:
        async for _ in omni.submit(template.inputs, template.modalities, **template.params):
            pass


if __name__ == "__main__":
    described = msgspec.json.decode(sys.stdin.buffer.read(), type=Pipeline)
    trio.run(partial(run, described, sys.argv[2] if sys.argv[2:] else None, loading=sys.argv[1] == "loading"))
