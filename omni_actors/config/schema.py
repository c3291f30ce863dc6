"""The schema of a pipeline file. A field's default and its meaning are written here and nowhere else."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from omni_actors.stages.registry import ENGINES, EngineSpec

NAME_PATTERN = r"^[a-z][a-z0-9_]*$"

MAX_REPLICAS = 64
"""The most replicas of a stage, and the most standbys."""
Positive = Annotated[int, Meta(ge=1, le=2**53)]
Count = Annotated[int, Meta(ge=0, le=2**31)]
Replicas = Annotated[int, Meta(ge=0, le=MAX_REPLICAS)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Name = Annotated[str, Meta(pattern=NAME_PATTERN)]
EnvironmentName = Annotated[str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_]*$")]
EnvironmentValue = Annotated[str, Meta(pattern=r"^[^\x00]*$")]
Label = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/=:-]*$", max_length=128)]


RoutingPolicy: TypeAlias = Literal["least_outstanding", "round_robin", "prefix"]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A mapping of the document. It refuses unknown keys."""


class Restart(Section, frozen=True, kw_only=True):
    """When the supervisor restarts the worker of a replica, and when it gives the replica up.

    The supervisor gives a replica up after more than ``intensity`` restarts within ``period_s``. A stage without a
    replica left has failed.
    """

    type: Literal["permanent", "transient", "temporary"] = "permanent"
    """The deaths that are followed by a restart: all (permanent), all but exit code 0 (transient), none (temporary)."""
    strategy: Literal["one_for_one", "rest_for_one", "one_for_all"] = "one_for_one"
    """The other workers that are restarted after a death: none, those of all stages downstream, all."""
    intensity: Count = 3
    """Restarts allowed within ``period_s``."""
    period_s: PositiveFloat = 60.0
    """Window of ``intensity``, in seconds."""
    backoff_s: PositiveFloat = 0.1
    """Seconds before the first restart. Each further restart within ``period_s`` doubles the wait."""
    backoff_max_s: PositiveFloat = 10.0
    """Longest wait before a restart, in seconds."""
    retry_s: Annotated[float, Meta(ge=0)] = 30.0
    """Seconds until a replica that was given up for its ``intensity`` is tried again; 0 means never."""
    retry_max_s: PositiveFloat = 600.0
    """Longest interval between two tries, in seconds. Each try that fails doubles the interval."""


class Limits(Section, frozen=True, kw_only=True):
    """Bounds of the running system. Sizes are bytes."""

    max_requests: Positive = 64
    """Requests admitted at the same time. Further ones are refused (``Overloaded``)."""
    deadline_s: PositiveFloat = 600.0
    """Deadline of a request that sets none, in seconds."""
    output_bytes: Positive = 64 * 1024 * 1024
    """Unread output of one request. A request that exceeds it ends (``SlowConsumer``). The content of its stages' rings
    may arrive at once, so ``output_bytes`` should be larger than their ``ring_bytes`` together."""
    unread_bytes: Positive = 256 * 1024 * 1024
    """Unread output of all requests. Above half of it, stages are paused."""
    window_bytes: Positive = 512 * 1024
    """Unread output of one request over HTTP. Above it, the request's stages are paused."""
    read_bytes_s: PositiveFloat = 16384.0
    """Least rate at which an HTTP client reads while its request waits for it, in bytes per second."""
    pixel_steps: Positive = 2**30
    """Width × height × steps × n of the pictures of one prompt. One that needs more is refused (``InvalidRequest``)."""
    replays: Count = 2
    """How often one request is replayed after deaths in one stage, until a replay brings its client a new output. The
    bound ends a request that kills workers: for one that may have, each replay counts, whatever it brings and whichever
    stage died."""
    quarantine_s: Annotated[float, Meta(ge=0)] = 600.0
    """Seconds for which a request is refused after requests like it ended at least two workers; 0 means not at all."""
    retain_bytes: Positive = 64 * 1024 * 1024
    """Outputs of one request that one stage retains for a replay. A request that exceeds it can be replayed only if the
    stage can compute its outputs again. As many bytes of memory may hold the request's checkpoints there; beyond that,
    none is kept. Without ``async_chunk``, also the input of one request that one stage gathers. A request that exceeds
    it ends."""
    worker_retain_bytes: Positive = 256 * 1024 * 1024
    """Outputs of all requests that one worker retains. Above it, the largest request loses its retained outputs. As
    many bytes of memory may hold checkpoints. Without ``async_chunk``, also the input that one worker gathers."""


class Autoscale(Section, frozen=True, kw_only=True):
    """Between which bounds the number of a stage's replicas follows its load."""

    min: Replicas = 1
    """The least number of replicas. With 0, the first request starts one."""
    max: Annotated[int, Meta(ge=1, le=MAX_REPLICAS)]
    """The largest number of replicas."""
    queue_time_s: PositiveFloat = 1.0
    """Seconds that a request may queue before replicas are added."""
    down_after_s: PositiveFloat = 300.0
    """Replicas that were not needed at any time within this many seconds are removed."""
    concurrency: Positive | None = None
    """Requests that one replica serves at a time; further ones count as queued. Null means the engine's option
    ``max_batch``, or 1 if it has none."""


class Cluster(Section, frozen=True, kw_only=True):
    """On which nodes the workers of a pipeline run when it is opened with a cluster (rules: ``cluster/placement.py``).

    It has no effect on a system without a cluster.
    """

    nodes: dict[str, Label] = {}
    """The label that a node needs to run workers of a stage, by stage. A node's name is one of its labels, and "parent"
    is one of the parent's node. A stage that is not named here may run on any node."""
    colocate: tuple[tuple[str, ...], ...] = ()
    """Groups of stages. Workers of one group that have the same number run on one node."""
    spread: tuple[str, ...] = ()
    """Stages whose workers are spread over as many nodes as possible, so that the loss of a node ends few of them."""
    lease_s: Annotated[float, Meta(ge=1, le=3600)] = 10.0
    """Seconds for which the workers of a node may run without hearing of the parent. An interruption of the network of
    up to about half of it only delays. After a longer one they end, and start again where there is room, about 1.1
    times as many seconds, and at least 1 s more, after the last sign of the parent."""
    tls: bool = False
    """Encrypt everything between nodes, with TLS and a certificate that is made at each start. Needed where others can
    listen on the network between the nodes, or change what it carries."""
    transport: Literal["tcp", "nixl"] = "tcp"
    """What carries records of 1 MiB or more between nodes: the link's TCP connection, or NIXL, which uses RDMA where
    there is some. NIXL needs the extra "nixl" on every node, encrypts nothing, and can be reached by all that can reach
    the nodes."""


class Stage(Section, frozen=True, kw_only=True):
    """One stage of a pipeline."""

    engine: str
    """An engine of the registry, or "package.module:factory" for one of your own."""
    model: str | None = None
    """A directory, the name of a model that an installed package carries, or "owner/name" on a model hub."""
    tokenizer: str | None = None
    """The tokenizer, named as ``model`` is; null means the model's own."""
    accepts: tuple[Name, ...] = ()
    """Kinds of input that the stage receives from the client."""
    inputs: tuple[str, ...] = ()
    """Stages whose output the stage receives."""
    emits: Name | None = None
    """The modality of the stage's output to the client. Without it the client receives nothing of this stage."""
    replicas: Replicas = 1
    """Workers that run this stage at first; ``OmniSystem.scale`` changes their number. With 0, requests for the stage
    wait until it has a worker, or their deadline passes. 64 at most."""
    scale_from_zero: bool = False
    """Whether a request that waits for the stage while it has no replicas starts one."""
    autoscale: Autoscale | None = None
    """Add and remove replicas by the load, from ``replicas`` on. Null means that only ``OmniSystem.scale`` does."""
    routing: RoutingPolicy = "least_outstanding"
    """The replica that a request is given: the one with the fewest requests, each in turn, or the one that was given
    the longest common prefix of the prompt (else the one with the fewest requests)."""
    drain_s: Annotated[float, Meta(ge=0)] = 60.0
    """Seconds that a replica's requests may run on when the stage is scaled down. Those that are left resume at another
    replica."""
    standby: Replicas = 0
    """Further workers that are loaded and get no request while all replicas serve. When one of those dies, a standby
    takes over its requests at once, and the restarted worker becomes the standby."""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Native threads of each worker; 0 means the machine's cores divided by all workers, at least 1."""
    nice: Annotated[int, Meta(ge=0, le=19)] = 0
    """Priority of the engine's threads, as ``nice(1)`` counts."""
    device: str = "cpu"
    """Device of the model, as torch names it: "cpu", "cuda:0". "cuda:1" is the first device of the first worker; each
    further worker takes the devices behind those of the one before."""
    devices: tuple[Annotated[int, Meta(ge=0, le=2**31)] | Annotated[str, Meta(pattern="^(GPU|MIG)-")], ...] = ()
    """With ``device: cuda``, the devices of one worker, to be shifted for the others, or those of all workers: places
    among the visible devices, or names as in CUDA_VISIBLE_DEVICES (rules: ``config/devices.py``)."""
    devices_per_replica: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Devices that each worker spans."""
    share_devices: bool = False
    """Whether workers of this stage may load onto one device."""
    env: dict[EnvironmentName, EnvironmentValue] = {}
    """Environment variables of the stage's workers, over those of the parent. What the runtime sets itself wins."""
    options: dict[str, Any] = {}
    """Options of the engine."""
    defaults: dict[str, Any] = {}
    """Request parameters for requests that do not set them."""
    deterministic: bool | None = None
    """Whether the engine gives the same output chunks again for the same parameters and input chunks, so that a request
    can be replayed. Null means what the engine's registry entry states."""
    resumable: bool | None = None
    """Whether the engine names its decisions and goes on from them after the death of a worker. If so, it need not be
    deterministic. Null means what the engine's registry entry states."""
    ring_bytes: Positive = 4 * 1024 * 1024
    """Capacity of each ring that carries the stage's output, in bytes. A chunk larger than half of it passes through in
    pieces, which are copied once more."""
    load_timeout_s: PositiveFloat = 600.0
    """Seconds from spawning a worker until it must be ready. The supervisor kills one that takes longer."""
    device_lock_timeout_s: PositiveFloat = 600.0
    """Seconds that a worker waits, before it is spawned, for other workers to have loaded onto its devices."""
    step_timeout_s: PositiveFloat = 30.0
    """Seconds that one turn of the engine loop may take: receiving what arrived, and one step. The supervisor kills a
    worker that takes longer."""
    shutdown_timeout_s: PositiveFloat = 2.0
    """Seconds that a worker has for its shutdown, before SIGKILL."""
    restart: Restart = Restart()
    """When the stage's workers are restarted, and when they are given up."""

    @property
    def workers(self) -> int:
        """The number of workers of this stage at first, standbys included."""
        return self.workers_for(self.replicas)

    @property
    def most_workers(self) -> int:
        """The largest number of workers of this stage, unless ``OmniSystem.scale`` sets another."""
        return self.workers if self.autoscale is None else max(self.workers, self.workers_for(self.autoscale.max))

    @property
    def starts_from_zero(self) -> bool:
        """Whether a request that waits for the stage while it has no replicas starts one."""
        return self.scale_from_zero or self.autoscale is not None

    def workers_for(self, replicas: int) -> int:
        """Return the number of workers for so many replicas. A stage without replicas has no standbys either."""
        return replicas + self.standby if replicas else 0


class Sections(Section, frozen=True, kw_only=True):
    """The top level of a pipeline file."""

    name: str
    description: str = ""
    stages: dict[Name, Stage]
    limits: Limits = Limits()
    modalities: tuple[Name, ...] = ()
    """Modalities of a request that names none, as far as its input leads to them. By default "text" or, where the input
    does not lead to it, all that it leads to."""
    async_chunk: bool = True
    """Whether chunks pass from stage to stage as they are made. If not, each stage's engine gets the input of a request
    when it is complete."""
    start_timeout_s: PositiveFloat | None = None
    """Seconds from opening the system until every replica must be ready for the first time (``StartTimedOut``). Null
    means no bound but those of the stages."""
    cpu_sharing: bool | None = None
    """Whether the pipeline decides how native threads wait for work ("Cores" in ``docs/architecture.md``). Without it
    their libraries decide. Null means: on, if a stage computes on the CPU."""
    pin_rings: bool = True
    """Whether workers on CUDA devices page-lock their rings, so that copies between device and ring are DMA. Where that
    fails, they log it and go on without."""
    device_handles: Literal["none", "cuda", "host"] = "none"
    """How two stages in the same memory pass tensors on. "none": as bytes, through their ring. "cuda": two workers on
    one CUDA device pass handles of its memory (CUDA IPC), which pays for tensors of more than 16 MiB. "host": workers
    on the CPU pass handles of host memory, which is no faster and tests the same protocol."""
    cluster: Cluster | None = None
    """On which nodes of a cluster the workers run. Null means that all run on the parent's node."""


class Pipeline(Sections, frozen=True, kw_only=True):
    """A pipeline. ``load`` returns it checked; ``OmniSystem.open`` and ``load`` also take one made in Python.

    Attributes:
        name: Name of the pipeline; over HTTP, the name of the model.
        description: One line for ``omni-actors config list``.
        stages: The stages by name, in the order in which the supervisor starts them.
        limits: Bounds of the running system.
        modalities: Modalities of a request that names none.
        async_chunk: Whether chunks pass from stage to stage as they are made.
        start_timeout_s: Seconds in which every replica must be ready for the first time; None: no bound.
        cpu_sharing: Whether native threads wait by the pipeline's rule; None: if a stage computes on the CPU.
        pin_rings: Whether workers on CUDA devices page-lock their rings.
        device_handles: How two stages in the same memory pass tensors on: as bytes ("none"), or by handle ("cuda",
            "host").
        cluster: On which nodes of a cluster the workers run; None: all on the parent's node.
        file: Where the pipeline was read from, for error messages. It is not part of the document.

    >>> echo = Stage(engine="echo", accepts=("messages",), emits="text")
    >>> Pipeline(name="one", stages={"only": echo}).options("only")["fan_out"]
    1
    """

    file: str = "-"

    def threads(self, stage: str) -> int:
        """Return the number of native threads of one worker of ``stage``."""
        workers = sum(each.replicas for each in self.stages.values())
        # A standby computes in place of a replica. Replicas that are added later have as many threads.
        return self.stages[stage].threads or max(1, _cores() // max(1, workers))

    @property
    def shares_cores(self) -> bool:
        """Whether native threads wait by the pipeline's rule (``cpu_sharing``)."""
        if self.cpu_sharing is None:
            return any(stage.device == "cpu" for stage in self.stages.values())
        return self.cpu_sharing

    @property
    def spins(self) -> bool:
        """Whether native threads may spin while they wait: all multi-threaded workers fit on the cores together.

        Always true without ``cpu_sharing``: the native libraries decide.
        """
        if not self.shares_cores:
            return True
        threads = [self.threads(name) * stage.replicas for name, stage in self.stages.items() if self.threads(name) > 1]
        return sum(threads) <= _cores()

    def spec(self, stage: str) -> EngineSpec:
        """Return the registry entry of the engine of ``stage``.

        An engine that is named by import path has an entry that allows any options and parameters: it checks them in
        the worker.
        """
        engine = self.stages[stage].engine
        return ENGINES.get(engine) or EngineSpec(engine, options=None, params=None, needs_model=False)

    def deterministic(self, stage: str) -> bool:
        """Return whether ``stage`` gives the same output chunks again for the same input."""
        configured = self.stages[stage].deterministic
        return self.spec(stage).deterministic if configured is None else configured

    def resumable(self, stage: str) -> bool:
        """Return whether ``stage`` goes on from its decisions after the death of a worker."""
        configured = self.stages[stage].resumable
        return self.spec(stage).resumable if configured is None else configured

    def concurrency(self, stage: str) -> int:
        """Return how many requests one replica of ``stage`` serves at a time, for its ``autoscale``."""
        autoscale, batch = self.stages[stage].autoscale, self.options(stage).get("max_batch")
        configured = autoscale.concurrency if autoscale is not None else None
        return configured or (batch if isinstance(batch, int) else 1)

    def options(self, stage: str) -> dict[str, Any]:
        """Return the effective options of ``stage``: the configured ones over its engine's defaults."""
        options, schema = self.stages[stage].options, self.spec(stage).options
        if schema is None:
            return options
        effective: dict[str, Any] = msgspec.to_builtins(msgspec.convert(options, schema))
        return effective


def _cores() -> int:
    return len(os.sched_getaffinity(0))
