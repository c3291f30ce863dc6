"""Drive engines in this process as a worker's engine loop drives them."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np

from omni_actors.stages.base import (
    CLIENT,
    Chunk,
    Decisions,
    StageCheckpoint,
    StageEngine,
    StageOutput,
    StageRequest,
)
from ringbuf import Bundle, Deferred, Tensor, decode_bundle, encode_bundle


class Driver:
    """Drives one engine and holds it to the protocol: what it names is live, and ends once.

    The tensors of chunks and checkpoints lie in memory that is taken away when ``feed`` or ``start`` ends. An engine
    that keeps a view meets a BufferError; one that keeps a tensor meets FrameReleased when it uses it.
    """

    def __init__(self, engine: StageEngine) -> None:
        self.engine = engine
        self.live: set[int] = set()
        self.checkpoints: dict[int, StageCheckpoint] = {}
        """The last one of each request that had one."""
        self._seq = 0

    def start(
        self,
        request_id: int,
        sources: tuple[str, ...] = (CLIENT,),
        *,
        journal: tuple[Decisions, ...] = (),
        needed_from: int = 0,
        downstream: bool = True,
        replayed: bool = False,
        checkpoint: StageCheckpoint | None = None,
        **params: Any,
    ) -> None:
        resumed: dict[str, Any] = {"journal": journal, "needed_from": needed_from}
        request = StageRequest(request_id, sources, params, downstream=downstream, replayed=replayed, **resumed)
        if checkpoint is None:
            self.engine.start(request)
        else:
            with _lent(checkpoint.tensors, checkpoint.data) as bundle:
                lent = StageCheckpoint(checkpoint.request_id, bundle.tensors, bundle.meta)
                self.engine.start(msgspec.structs.replace(request, checkpoint=lent))
        self.live.add(request_id)

    def feed(
        self,
        request_id: int,
        data: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Any] | None = None,
        *,
        last: bool = False,
        source: str = CLIENT,
    ) -> None:
        with _lent(tensors or {}) as bundle:
            chunk = Chunk(source=source, seq=self._seq, last=last, tensors=bundle.tensors, data=data or {})
            self._seq += 1
            self.engine.feed(request_id, chunk)

    def abort(self, request_id: int) -> None:
        self.live.discard(request_id)
        self.engine.abort(request_id)

    def step(self) -> list[Any]:
        """The outputs and failures of one step."""
        assert self.engine.busy
        outputs, written = [], []
        for output in self.engine.step():
            assert output.request_id in self.live, f"request {output.request_id} is not live"
            if isinstance(output, StageCheckpoint):
                self.checkpoints[output.request_id] = _copied(output)
                continue
            if not isinstance(output, StageOutput) or output.last:
                self.live.discard(output.request_id)
            outputs.append(output)
            if isinstance(output, StageOutput):
                written.append({name: _bytes(tensor) for name, tensor in for_stages(output).items()})
        kept = [output for output in outputs if isinstance(output, StageOutput)]
        for output, before in zip(kept, written, strict=True):
            assert {name: _bytes(t) for name, t in for_stages(output).items()} == before, "written to after the step"
        return [_landed(output) for output in outputs]

    def run(self) -> dict[int, list[Any]]:
        """Step while the engine is busy: the outputs of each request, in order."""
        outputs: dict[int, list[Any]] = {}
        while self.engine.busy:
            for output in self.step():
                outputs.setdefault(output.request_id, []).append(output)
        return outputs


def run_chain(
    stages: Mapping[str, Driver], arrivals: Sequence[Callable[[], None]], order: random.Random | None = None
) -> dict[str, dict[int, list[Any]]]:
    """Each stage's outputs by request, where each feeds the next one as the workers' loops would.

    A request that has ended in a stage takes no more there. Each of ``arrivals`` starts one request in all stages and
    feeds the first. order: draws when they come and which stage steps; without it, all come first and step in turn.
    """
    outputs: dict[str, dict[int, list[Any]]] = {name: {} for name in stages}
    below = dict(zip(stages, [*stages.values()][1:], strict=False))
    coming = deque(arrivals)
    try:
        while coming or any(driver.engine.busy for driver in stages.values()):
            working = [name for name, driver in stages.items() if driver.engine.busy]
            if coming and (order is None or not working or order.random() < 0.2):
                coming.popleft()()
                continue
            for name in working if order is None else [order.choice(working)]:
                for output in stages[name].step():
                    outputs[name].setdefault(output.request_id, []).append(output)
                    if name in below and output.request_id in below[name].live:
                        tensors = for_stages(output)
                        below[name].feed(output.request_id, output.data, tensors, last=output.last, source=name)
        assert not any(driver.live for driver in stages.values()), "a request waits for ever"
    finally:
        for driver in stages.values():
            for request_id in list(driver.live):
                driver.abort(request_id)
    return outputs


def for_stages(output: StageOutput) -> dict[str, Any]:
    """What a stage below finds among its chunk's tensors."""
    assert not output.tensors.keys() & output.downstream.keys()
    return {**output.tensors, **output.downstream}


@contextmanager
def _lent(tensors: Mapping[str, Any], meta: Mapping[str, Any] | None = None) -> Iterator[Bundle]:
    """Give a bundle in memory that is taken away at the end of the block. Raises BufferError if a view is alive."""
    memory = bytearray(b"".join(encode_bundle(meta, tensors)))
    try:
        with memoryview(memory) as view:
            yield decode_bundle(view)
    finally:
        memory.clear()  # refused while anything looks at it


def _copied(checkpoint: StageCheckpoint) -> StageCheckpoint:
    """Return what a later incarnation gets: a checkpoint is copied when it is yielded."""
    tensors = {name: np.array(tensor) for name, tensor in checkpoint.tensors.items()}
    return StageCheckpoint(checkpoint.request_id, tensors, dict(checkpoint.data))


def _bytes(tensor: Any) -> bytes:
    return tensor.tobytes() if isinstance(tensor, np.ndarray) else bytes(_on_host(tensor).data)


def _landed(output: Any) -> Any:
    """Return an output as it leaves its ring: without bytes that are still on a device."""
    if not isinstance(output, StageOutput):
        return output
    tensors, downstream = (
        {name: _on_host(tensor) for name, tensor in each.items()} for each in (output.tensors, output.downstream)
    )
    return msgspec.structs.replace(output, tensors=tensors, downstream=downstream)


def _on_host(tensor: Any) -> Any:
    if not isinstance(tensor, Tensor) or not isinstance(tensor.buffer, Deferred):
        return tensor
    memory = bytearray(tensor.nbytes)
    tensor.buffer.copy_into(memoryview(memory))
    return Tensor(tensor.dtype, tensor.shape, memory)
