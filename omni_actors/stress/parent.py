"""A process that runs a pipeline until it is killed: ``python -m omni_actors.stress.parent loading|serving``.

Reads the pipeline as JSON from stdin. Prints a line once its workers load, or once it serves requests.
"""

from __future__ import annotations

import sys
from functools import partial

import msgspec
import trio

from omni_actors.config import Pipeline
from omni_actors.stress.workload import Template, find
from omni_actors.system import OmniSystem


async def live(pipeline: Pipeline, *, loading: bool) -> None:
    """Until killed."""
    templates = tuple(find(pipeline, {}).templates.values())
    async with OmniSystem.open(pipeline, wait_ready=not loading) as omni, trio.open_nursery() as nursery:
        while not all(each.pid for stage in omni.health().stages.values() for each in stage):  # noqa: ASYNC110
            await trio.sleep(0.001)
        if not loading:
            for template in templates:
                nursery.start_soon(_ask_for_ever, omni, template)
        print("loading" if loading else "serving", flush=True)
        await trio.sleep_forever()


async def _ask_for_ever(omni: OmniSystem, template: Template) -> None:
    while True:
        async for _ in omni.submit(template.inputs, template.modalities, **template.params):
            pass


if __name__ == "__main__":
    described = msgspec.json.decode(sys.stdin.buffer.read(), type=Pipeline)
    trio.run(partial(live, described, loading=sys.argv[1] == "loading"))
