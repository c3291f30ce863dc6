"""Drives BAGEL's engines in this process: context and denoiser, joined by chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omni_actors.stages.base import StageCheckpoint, StageContext, StageOutput
from tests.stages.bagel import cases
from tests.support.engine_driver import Driver, for_stages
from tests.support.stage_context import stage_context


def context(directory: Path, stage: str, **options: Any) -> StageContext:
    return stage_context(options, stage=stage, model=directory)


def chunks_of(terms: list[Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The client's chunks of a request with these terms, as ``cases`` has them."""
    parts: list[dict[str, Any]] = []
    images: list[Any] = []
    for term in terms:
        if isinstance(term, str):
            parts.append({"type": "text", "text": term})
        else:
            parts.append({"type": "image", "index": len(images)})
            images.append(cases.picture(*term[1:]))
    words = [({"messages": [{"role": "user", "content": parts}]}, {})]
    return [*(({"index": i}, {"image": image}) for i, image in enumerate(images)), *words]


def params_of(case: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a request of ``cases.PICTURES``."""
    params = {
        "guidance": case["guidance"],
        "image_guidance": case["image_guidance"],
        "guidance_from": case.get("from", 0.0),
        "renorm": case.get("renorm", "global"),
        "renorm_min": case.get("renorm_min", 0.0),
        "shift": cases.SHIFT,
        "steps": cases.STEPS,
        "seed": cases.SEED,
    }
    if "size" in case:
        height, width = case["size"]
        params["size"] = f"{width}x{height}"
    if case.get("think"):
        params |= {"think": True, "max_tokens": cases.TOKENS - 1}
    return params


class Bagel:
    """Two engines, of which the first feeds the second."""

    OF_DENOISER = ("steps", "guidance", "image_guidance", "guidance_from", "renorm", "renorm_min", "shift", "previews")
    ONLY_DENOISER = ("steps", "guidance_from", "renorm", "renorm_min", "shift", "previews")

    def __init__(self, reader: Any, painter: Any) -> None:
        self.reader, self.painter = Driver(reader), Driver(painter)
        self.thoughts: list[int] = []
        """The tokens that the reader wrote for the last picture."""

    def write(self, terms: list[Any], **params: Any) -> list[StageOutput]:
        """The outputs of a request for a text."""
        self.reader.start(1, downstream=False, **params)
        self._feed(1, terms)
        return self.reader.run()[1]

    def start(self, request_id: int, terms: list[Any], **params: Any) -> None:
        """Start a request for a picture and feed it."""
        own = {name: value for name, value in params.items() if name not in self.ONLY_DENOISER}
        self.reader.start(request_id, **own)
        self.painter.start(
            request_id, ("context",), **{name: params[name] for name in params if name in self.OF_DENOISER}
        )
        self._feed(request_id, terms)

    def run(self) -> dict[int, list[Any]]:
        """The events of the painter by request, checkpoints too."""
        events: dict[int, list[Any]] = {}
        while self.reader.engine.busy or self.painter.engine.busy:
            if self.reader.engine.busy:
                for output in self.reader.step():
                    self.thoughts += output.decisions
                    data, tensors = output.data, for_stages(output)
                    self.painter.feed(output.request_id, data, tensors, last=output.last, source="context")
            if self.painter.engine.busy:
                for event in self.painter.engine.step():
                    events.setdefault(event.request_id, []).append(event)
        self.painter.live.clear()
        return events

    def draw(self, terms: list[Any], **params: Any) -> tuple[list[StageOutput], list[StageCheckpoint]]:
        """The outputs and the checkpoints of a request for a picture."""
        self.thoughts = []
        self.start(1, terms, **params)
        events = self.run()[1]
        return (
            [event for event in events if isinstance(event, StageOutput)],
            [event for event in events if isinstance(event, StageCheckpoint)],
        )

    def _feed(self, request_id: int, terms: list[Any]) -> None:
        chunks = chunks_of(terms)
        for i, chunk in enumerate(chunks):
            self.reader.feed(request_id, *chunk, last=i == len(chunks) - 1)
