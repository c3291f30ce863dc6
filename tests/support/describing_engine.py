"""An engine that tells what it gets, one text for each chunk of its input."""

from __future__ import annotations

from collections.abc import Iterable

from omni_actors.stages.base import Chunk, RequestId, StageContext, StageOutput, StageRequest


class Describe:
    """Answers each chunk with its source, its data, and the types and shapes of its tensors."""

    def __init__(self, context: StageContext) -> None:
        self._outputs: list[StageOutput] = []

    @property
    def busy(self) -> bool:
        return bool(self._outputs)

    def start(self, request: StageRequest) -> None:
        pass

    def feed(self, request_id: RequestId, chunk: Chunk) -> None:
        tensors = {name: f"{tensor.dtype} {tensor.shape}" for name, tensor in chunk.tensors.items()}
        text = f"{chunk.source}: {dict(chunk.data)} {tensors}\n"
        self._outputs.append(StageOutput(request_id, data={"text": text}, last=chunk.last))

    def abort(self, request_id: RequestId) -> None:
        self._outputs = [output for output in self._outputs if output.request_id != request_id]

    def step(self) -> Iterable[StageOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def close(self) -> None:
        pass
