"""The peers that must be installed: pyzmq, iceoryx2, vllm-omni's connector, Ray's object store.

Rule: a peer that is not installed is missing, with the reason; it is imported when it is first opened, never before.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
import types
import uuid
from collections import deque
from collections.abc import Iterable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.ring.measure import Check, Notes, Sink, fork
from bench.ring.transports import in_flight


class ZmqMsgpack:
    """pyzmq PUSH to PULL over ipc, told not to copy; msgspec's msgpack of the bytes, decoded in place."""

    name = "pyzmq ipc + msgpack"

    def takes(self, size: int) -> bool:
        return True

    def open(self, size: int) -> None:
        import zmq  # noqa: F401  (fails before a process starts)

        self._folder = tempfile.mkdtemp(prefix="zmq-")
        self._limit = in_flight(size) // 2 or 1  # each end has a queue of its own

    def produce(self, messages: Iterable[memoryview]) -> None:
        import zmq

        encode = msgspec.msgpack.Encoder().encode
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.sndhwm = self._limit
            socket.bind(f"ipc://{self._folder}/s")
            for message in messages:
                socket.send(encode(message), copy=False)

    def consume(self, check: Check) -> None:
        import zmq

        decode = msgspec.msgpack.Decoder(memoryview).decode
        with zmq.Context() as context, context.socket(zmq.PULL) as socket:
            socket.rcvhwm = self._limit
            socket.connect(f"ipc://{self._folder}/s")
            while not check(decode(socket.recv(copy=False).buffer)):
                pass

    def close(self) -> None:
        shutil.rmtree(self._folder)


class Iceoryx:
    """iceoryx2 publish-subscribe of byte slices: loan, copy into the loan, send; the sample is read in place.

    The consumer polls without a pause: the fastest use of it, at the price of a whole core.
    """

    name = "iceoryx2, spinning"
    _events = False

    def takes(self, size: int) -> bool:
        return True

    def open(self, size: int) -> None:
        import iceoryx2  # noqa: F401

        self._size, self._buffer = size, in_flight(size)
        self._prefix = f"bench-ring-{uuid.uuid4().hex[:8]}-"
        self._folder = tempfile.mkdtemp(prefix="iox2-")
        self._subscribed, self._published, self._connected = fork.Event(), fork.Event(), fork.Event()

    def _node(self) -> tuple[Any, Any, Any]:
        import iceoryx2 as iox2

        iox2.set_log_level(iox2.LogLevel.Error)
        config = iox2.config.default()
        config.global_cfg.prefix = iox2.FileName.new(self._prefix)
        config.global_cfg.root_path = iox2.Path.new(self._folder)
        node = iox2.NodeBuilder.new().config(config).create(iox2.ServiceType.Ipc)
        name = iox2.ServiceName.new("bench-ring")
        channel = (
            node.service_builder(name)
            .publish_subscribe(iox2.Slice[ctypes.c_uint8])
            .enable_safe_overflow(False)
            .subscriber_max_buffer_size(self._buffer)
            .subscriber_max_borrowed_samples(2)
            .open_or_create()
        )
        return node, channel, node.service_builder(name).event().open_or_create() if self._events else None

    def produce(self, messages: Iterable[memoryview]) -> None:
        import iceoryx2 as iox2

        _node, channel, event = self._node()
        publisher = (
            channel.publisher_builder()
            .initial_max_slice_len(self._size)
            .backpressure_strategy(iox2.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        notifier = event.notifier_builder().create() if event is not None else None
        self._subscribed.wait()
        publisher.update_connections()
        self._published.set()
        self._connected.wait()
        loan, move, size = publisher.loan_slice_uninit, ctypes.memmove, self._size
        address = 0
        for message in messages:
            if not address:
                address = np.frombuffer(message, np.uint8).ctypes.data
            sample = loan(size)
            move(sample.payload_ptr, address, size)
            sample.assume_init().send()
            if notifier is not None:
                notifier.notify()

    def consume(self, check: Check) -> None:
        _node, channel, event = self._node()
        subscriber = channel.subscriber_builder().buffer_size(self._buffer).create()
        listener = event.listener_builder().create() if event is not None else None
        self._subscribed.set()
        self._published.wait()
        if subscriber.receive() is not None:  # connects; before that, messages that do not fit its buffer are dropped
            raise RuntimeError("received a message before the first was sent")
        self._connected.set()
        last = False
        while not last:
            sample = subscriber.receive()
            if sample is not None:
                last = check(sample.payload().as_memory_view())
                sample.delete()
            elif listener is not None:
                listener.blocking_wait()

    def close(self) -> None:
        shutil.rmtree(self._folder)
        for left in Path("/dev/shm").glob(f"{self._prefix}*"):
            left.unlink()


class IceoryxEvents(Iceoryx):
    """One notification per message. The consumer sleeps in ``blocking_wait``."""

    name = "iceoryx2, events"
    _events = True


class VllmOmni:
    """The connector's ``put`` in one process, and ``get`` of the same key in the other, which polls without a pause.

    Its own receive loop waits 1 ms between polls; leaving that out is in its favour. The payload is bytes, which
    it copies less often than a tensor. It has no backpressure: a semaphore bounds what is under way.
    """

    name = "vllm-omni 0.30.0 connector"

    def takes(self, size: int) -> bool:
        return True

    def open(self, size: int) -> None:
        self._module = _vllm_connector()
        resource_tracker.ensure_running()  # shared by both processes: one end registers what the other unregisters
        self._key = f"bench-ring-{uuid.uuid4().hex}"
        self._room = fork.Semaphore(min(64, in_flight(size)))

    def produce(self, messages: Iterable[memoryview]) -> None:
        with self._module.SharedMemoryConnector({}) as connector:
            for number, message in enumerate(messages):
                self._room.acquire()
                done, _, _ = connector.put("0", "1", f"{self._key}-{number}", message)
                if not done:
                    raise RuntimeError("put failed")

    def consume(self, check: Check) -> None:
        with self._module.SharedMemoryConnector({}) as connector:
            number, last = 0, False
            while not last:
                found = connector.get("0", "1", f"{self._key}-{number}")
                if found is None:
                    continue
                last = check(found[0])
                number += 1
                self._room.release()

    def close(self) -> None:
        for left in Path("/dev/shm").glob(f"*{self._key}*"):
            left.unlink()


def _vllm_connector() -> types.ModuleType:
    """Import the connector's module without its packages' ``__init__``, which import all of vllm.

    What its modules import and do not use here is replaced by stubs, for the rest of this process.
    """
    if "vllm_omni" not in sys.modules:
        spec = importlib.util.find_spec("vllm_omni")
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError("No module named 'vllm_omni'", name="vllm_omni")
        root = Path(spec.submodule_search_locations[0])
        unused: dict[str, dict[str, Any]] = {
            "vllm": {},
            "vllm.outputs": {"RequestOutput": type("RequestOutput", (), {}), "CompletionOutput": type("_", (), {})},
            "vllm_omni.config.yaml_util": {"to_dict": dict},
            "vllm_omni.platforms": {"current_omni_platform": None},
        }
        entered = ("vllm_omni", "vllm_omni.distributed", "vllm_omni.distributed.omni_connectors", "vllm_omni.config")
        for name in (*entered, *unused):
            module = types.ModuleType(name)
            module.__path__ = [str(root.joinpath(*name.split(".")[1:]))] if name in entered else []
            module.__dict__.update(unused.get(name, {}))
            sys.modules[name] = module
    importlib.import_module("vllm_omni.distributed.omni_connectors.utils.serialization")
    return importlib.import_module("vllm_omni.distributed.omni_connectors.connectors.shm_connector")


STORE_BYTES = 512 << 20


class RayStore:
    """``ray.put`` in the driver. An actor in another process gets the object as its argument.

    Ray's daemons run on any core, and their CPU time is not counted.
    """

    name = "Ray object store"

    def takes(self, size: int) -> bool:
        return True

    def start(self) -> None:
        """Start a local cluster in a process of its own, whose end stops the cluster."""
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_AUTH_MODE"] = "disabled"  # otherwise it leaves a token in the user's home
        import ray  # noqa: F401

        self._folder = tempfile.mkdtemp(prefix="ray-")
        here, there = fork.Pipe()
        self._holder = fork.Process(target=_hold_cluster, args=(here, there, self._folder))
        self._holder.start()
        there.close()
        self._control = here
        try:
            self._address = here.recv()
        except EOFError:
            self.stop()
            raise RuntimeError("Ray did not start") from None

    def stop(self) -> None:
        self._control.close()
        self._holder.join(30)
        self._holder.kill()
        self._holder.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def open(self, size: int) -> None:
        self._window = min(100, max(2, in_flight(size)))

    def run(self, messages: Iterable[memoryview], sink: Sink, consumer_core: int) -> Notes:
        import ray

        ray.init(address=self._address, log_to_driver=False, logging_level="ERROR")
        try:
            taker = ray.remote(Taker).remote(sink.size, str(sink.ack), consumer_core)
            ray.get(taker.notes.remote())  # wait until the actor runs
            under_way: deque[Any] = deque()
            for message in messages:
                under_way.append(taker.take.remote(ray.put(np.frombuffer(message, np.uint8))))
                if len(under_way) >= self._window:
                    ray.get(under_way.popleft())
            ray.get(list(under_way))
            notes: Notes = ray.get(taker.notes.remote())
            return notes
        finally:
            ray.shutdown()

    def close(self) -> None:
        """Do nothing: ``stop`` ends the cluster."""


class Taker:
    """The actor, which is the consumer."""

    def __init__(self, size: int, ack: str, core: int) -> None:
        os.sched_setaffinity(0, {core})
        self._sink = Sink(size, Path(ack))

    def take(self, array: np.ndarray[Any, Any]) -> None:
        self._sink.check(array)

    def notes(self) -> Notes:
        return self._sink.notes


def _hold_cluster(parents: Connection, control: Connection, folder: str) -> None:
    parents.close()  # otherwise this end would keep the pipe open
    import ray

    context = ray.init(
        num_cpus=2,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=folder,
    )
    control.send(context.address_info["address"])
    try:
        control.recv()
    except EOFError:
        ray.shutdown()
