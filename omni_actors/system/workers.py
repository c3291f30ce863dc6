"""From a pipeline to the processes and rings that run it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from omni_actors.config import Pipeline
from omni_actors.protocol.messages import CLIENT, Address, Bounds, WorkerSpec
from omni_actors.stages import assets
from omni_actors.supervisor.calls import CALL_MESSAGES
from omni_actors.supervisor.edges import EdgeSpec
from omni_actors.system import machine

WORKER_DESCRIPTORS, RING_DESCRIPTORS = 8, 4
"""File descriptors that the parent opens for each worker and each ring. A test counts them."""
CONNECT_DESCRIPTORS = 3
"""The copies of a ring's descriptors in the message that connects one worker to the ring. The parent has them open
until the message is sent. When a worker starts, the parent posts the messages about all its rings at once."""
REQUEST_MESSAGES = 7
"""Control messages that one request may cause: Start with its JournalPart and CheckpointMemory; Abort; Resend and
Switch, after the restart of another stage; Resume, after Pause."""
REPLICA_MESSAGES, OTHER_MESSAGES = 2, 8
"""Places in a mailbox for messages that come once for each replica at the other end of a ring, and for all others."""


def edge_specs(pipeline: Pipeline) -> list[EdgeSpec]:
    """Return the edges between stages, from the client and to the client. The producing stage sets the ring's size."""
    specs = []
    for name, stage in pipeline.stages.items():
        specs += [EdgeSpec(source, name, pipeline.stages[source].ring_bytes) for source in stage.inputs]
        if stage.accepts:
            specs.append(EdgeSpec(CLIENT, name, stage.ring_bytes))
        if stage.emits:
            specs.append(EdgeSpec(name, CLIENT, stage.ring_bytes))
    return specs


def worker_specs(pipeline: Pipeline, models: Mapping[str, Path], order: Sequence[str]) -> list[WorkerSpec]:
    """Return what each worker runs at first, stage by stage in ``order``. models: the model directory by stage.

    Raises ConfigError: a device is not visible.
    """
    return [
        worker_spec(pipeline, models, Address(name, replica), devices)
        for name in order
        for replica, devices in enumerate(machine.device_layout(pipeline, name))
    ]


def worker_spec(
    pipeline: Pipeline, models: Mapping[str, Path], address: Address, devices: tuple[str, ...]
) -> WorkerSpec:
    """Return what the worker of one replica runs. models: the model directory by stage. devices: its own ones."""
    limits, name = pipeline.limits, address.stage
    return WorkerSpec(
        address=address,
        factory=pipeline.spec(name).factory,
        model=str(models[name].absolute()) if name in models else None,  # other nodes have other working directories
        tokenizer=_directory(pipeline.stages[name].tokenizer),
        options=pipeline.options(name),
        threads=pipeline.threads(name),
        nice=pipeline.stages[name].nice,
        device="cuda:0" if devices else pipeline.stages[name].device,
        devices=devices,
        pin_rings=pipeline.pin_rings,
        device_handles=pipeline.device_handles,
        spins=pipeline.spins,
        shares_cores=pipeline.shares_cores and pipeline.stages[name].device == "cpu",
        resumable=pipeline.resumable(name),
        bounds=Bounds(limits.retain_bytes, limits.worker_retain_bytes),
        gathers=not pipeline.async_chunk,
    )


def mailbox_capacity(pipeline: Pipeline, replicas: int) -> int:
    """Return how many control messages may wait for one worker. replicas: of all stages, when it starts.

    A worker that starts gets a message about each of its rings at once. Replicas that are added later announce theirs
    one by one.

    One half of a mailbox has room for the messages that may be posted at one time. While the other half is full,
    requests are neither admitted nor paused. The room is counted with one JournalPart for each request. If several for
    one request fill the mailbox, its worker is killed, as any worker that does not read (``Replica.post``).
    """
    requests = REQUEST_MESSAGES * pipeline.limits.max_requests
    return 2 * (requests + REPLICA_MESSAGES * replicas + CALL_MESSAGES + OTHER_MESSAGES)


def _directory(model: str | None) -> str | None:
    return None if model is None else str(assets.resolve(model).absolute())


def descriptors(pipeline: Pipeline) -> int:
    """Return how many file descriptors the parent has open for ``pipeline`` at most.

    It counts those of all workers and rings, those in the messages that connect the worker with the most rings, and
    one for each checkpoint: each resumable stage may keep one of each request.
    """
    replicas = {CLIENT: 1} | {name: stage.most_workers for name, stage in pipeline.stages.items()}
    specs, announced = edge_specs(pipeline), Counter[str]()
    rings = sum(replicas[spec.producer] * replicas[spec.consumer] for spec in specs)
    for spec in specs:
        for stage, peer in ((spec.producer, spec.consumer), (spec.consumer, spec.producer)):
            announced[stage] += replicas[peer] * (1 if peer == CLIENT else 2)
    del announced[CLIENT]
    connecting = CONNECT_DESCRIPTORS * max(announced.values(), default=0)
    checkpoints = pipeline.limits.max_requests * sum(map(pipeline.resumable, pipeline.stages))
    if pipeline.cluster is not None:
        checkpoints *= 2  # the proxy of memory on another node has an end that is watched
    return WORKER_DESCRIPTORS * (sum(replicas.values()) - 1) + RING_DESCRIPTORS * rings + connecting + checkpoints
