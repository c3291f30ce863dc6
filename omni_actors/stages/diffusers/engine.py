"""The ``diffusers`` engine: a whole pipeline of diffusers, from a prompt, or a prompt and pictures, to pictures.

Input, from the client: messages (the text of the user's last one is the prompt) and pictures.

Output: for each preview and for the picture one chunk, ``tensors["image"]``, uint8 (height, width, 3), with ``step``,
``total`` and ``final`` (false for a preview). A video is one such chunk for each ``frame`` of ``frames``, all final.
Where the form of the latents is not known, or a safety checker has to see a picture first, previews have no tensor.

Rules
1. A step of the engine is one denoising step of one request; the first one also encodes the prompt, and the one behind
   the last decodes the picture. Requests take turns. A paused request keeps none of ``max_running`` places.
2. There is no batch: pipelines begin with all requests of a batch at once, and these join at any time. So a request is
   computed as the pipeline alone computes it, and its picture is a function of prompt, pictures, parameters and seed.
3. A call cannot begin in its middle. After a death, a new incarnation computes the request again from its seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from omni_actors.stages import base
from omni_actors.stages.diffusers import loading
from omni_actors.stages.diffusers.arguments import blamed
from omni_actors.stages.diffusers.call import PipelineCall, Runner, Step
from omni_actors.stages.diffusers.options import DiffusersOptions, DiffusersParams
from omni_actors.stages.diffusers.pictures import Pictures
from omni_actors.stages.diffusers.prompt import Prompt
from omni_actors.stages.engine import PausableEngine
from omni_actors.stages.refusal import request_work, validated


class _Request:
    def __init__(self, request: base.StageRequest, options: DiffusersOptions) -> None:
        self.id = request.request_id
        self.params = validated(request.params, DiffusersParams)
        self.prompt = Prompt(request.sources, options)
        self.runner: Runner | None = None
        self.arguments: dict[str, Any] = {}
        self.call: PipelineCall | None = None
        self.total = 0
        self.pictures: Pictures | None = None
        self.sent = 0
        """How many of ``pictures`` were put out."""
        self.paused = False

    @property
    def ready(self) -> bool:
        return self.runner is not None and not self.paused


class DiffusersEngine(PausableEngine[_Request]):
    """Runs a pipeline of diffusers. ``context.model``: its directory, with a ``model_index.json``."""

    def __init__(self, context: base.StageContext) -> None:
        super().__init__()
        self._options = msgspec.convert(context.options, DiffusersOptions)
        pipeline = loading.load(context, self._options)
        self._runner = self._with_image = Runner(pipeline, self._options)
        if not self._runner.arguments.takes("image"):
            twin = loading.image_pipeline(pipeline)
            self._with_image = self._runner if twin is None else Runner(twin, self._options)

    def _new_request(self, request: base.StageRequest) -> _Request:
        return _Request(request, self._options)

    def _take(self, request: _Request, chunk: base.Chunk) -> None:
        request.prompt.feed(chunk)
        if not request.prompt.complete:
            return
        runner = self._with_image if request.prompt.images else self._runner
        request.arguments = runner.arguments.make(request.params, request.prompt.text, request.prompt.images)
        request.runner = runner

    def step(self) -> Iterator[base.StageOutput | base.StageFailure]:
        """Compute the next step of a request, or put out a frame of one that is computed."""
        request = self._next()
        try:
            with request_work():
                output = self._advance(request)
        except base.InvalidRequest as error:
            self.abort(request.id)
            yield base.StageFailure(request.id, blamed(error))
            return
        if output is not None:
            if output.last:
                del self._requests[request.id]
            yield output

    def _next(self) -> _Request:
        """Return the request whose turn it is, and put it behind the others."""
        ready = [request for request in self._requests.values() if request.ready]
        running = [request for request in ready if request.call is not None]
        computed = [request for request in ready if request.pictures is not None]
        waiting = [request for request in ready if request.call is None and request.pictures is None]
        if computed:
            chosen = computed[0]
        elif waiting and len(running) < self._options.max_running:
            chosen = min(waiting, key=lambda request: (request.params.priority, request.id))
        else:
            chosen = running[0]
        self._requests[chosen.id] = self._requests.pop(chosen.id)
        return chosen

    def _advance(self, request: _Request) -> base.StageOutput | None:
        if request.pictures is None:
            if request.call is None:
                assert request.runner is not None, "a request that waits is complete"
                request.call = PipelineCall(request.runner, request.arguments, request.params)
            made = request.call.advance()
            if isinstance(made, Step):
                return self._after(request, made)
            request.call, request.pictures = None, made
        return self._picture(request, request.pictures)

    def _after(self, request: _Request, done: Step) -> base.StageOutput | None:
        request.total = done.total
        if not done.shown:
            return None
        data = {"step": done.step, "total": done.total, "final": False}
        return base.StageOutput(request.id, {} if done.preview is None else {"image": done.preview}, data)

    def _picture(self, request: _Request, pictures: Pictures) -> base.StageOutput:
        data: dict[str, Any] = {"step": request.total, "total": request.total, "final": True}
        if pictures.is_video:
            data |= {"frame": request.sent, "frames": len(pictures)}
        picture = pictures[request.sent]
        request.sent += 1
        return base.StageOutput(request.id, {"image": picture}, data, last=request.sent == len(pictures))

    def abort(self, request_id: base.RequestId) -> None:
        """Forget a request. Its call ends here, so its memory is free at once."""
        request = self._requests.get(request_id)
        if request is not None and request.call is not None:
            request.call.cancel()
        super().abort(request_id)

    def close(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)
        del self._runner, self._with_image
