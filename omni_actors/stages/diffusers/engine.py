"""The ``diffusers`` engine: a whole pipeline of diffusers, from a prompt, or a prompt and pictures, to pictures.

Input, from the client: messages (the text of the user's last one is the prompt) and pictures.

Output: for each preview and for the picture one chunk, ``tensors["image"]``, uint8 (height, width, 3), with ``step``,
``total`` and ``final`` (false for a preview). A video is one such chunk for each ``frame`` of ``frames``, all final.
Where the form of the latents is not known, or a safety checker has to see a picture first, previews have no tensor.
A preview that fails to decode leaves its call without previews, and fails no request.

Rules
1. A step of the engine is one denoising step of one request; the first one also encodes the prompt, and the one behind
   the last decodes the picture. Requests take turns. A paused request keeps none of ``max_running`` places.
2. There is no batch: pipelines begin with all requests of a batch at once, and these join at any time. So a request is
   computed as the pipeline alone computes it, and its picture is a function of prompt, pictures, parameters and seed.
3. A request's LoRA adapter is applied while its call computes. It updates the pipeline's transformer or U-Net.
4. A call cannot begin in its middle. After a death, a new incarnation computes the request again from its seed, without
   the previews that have arrived. The decision of an output is its step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import msgspec

from omni_actors.stages import base
from omni_actors.stages.adapters.batched import BatchedAdapters
from omni_actors.stages.adapters.engine import AdaptedEngine
from omni_actors.stages.adapters.files import named
from omni_actors.stages.diffusers import loading
from omni_actors.stages.diffusers.arguments import blamed
from omni_actors.stages.diffusers.call import PipelineCall, Runner, Step
from omni_actors.stages.diffusers.options import PROMPT_CHARACTERS, DiffusersOptions, DiffusersParams
from omni_actors.stages.diffusers.pictures import Pictures
from omni_actors.stages.diffusion.pace import Pace
from omni_actors.stages.diffusion.prompt import user_pictures, user_text
from omni_actors.stages.engine import PausableEngine
from omni_actors.stages.multimodal.prompt import OmniPrompt
from omni_actors.stages.refusal import beyond_context, request_work, validated


class _Request:
    def __init__(self, request: base.StageRequest) -> None:
        self.id = request.request_id
        self.params = validated(request.params, DiffusersParams)
        self.adapter = named(self.params.lora)
        self.prompt = OmniPrompt(request.sources)
        self.runner: Runner | None = None
        self.arguments: dict[str, Any] = {}
        self.call: PipelineCall | None = None
        self.step = self.total = 0
        """The steps that were done, and those of the picture; 0 before the first step."""
        self.pictures: Pictures | None = None
        self.sent = 0
        """How many of ``pictures`` were put out."""
        self.step_seen = request.journal[request.needed_from - 1][0] if request.needed_from else 0
        """The last step whose output arrived before a death; 0: none."""
        self.paused = False

    @property
    def ready(self) -> bool:
        return self.runner is not None and not self.paused


class DiffusersEngine(AdaptedEngine[_Request, BatchedAdapters], PausableEngine[_Request]):
    """Runs a pipeline of diffusers. ``context.model``: its directory, with a ``model_index.json``."""

    def __init__(self, context: base.StageContext) -> None:
        super().__init__()
        self._options = msgspec.convert(context.options, DiffusersOptions)
        pipeline = loading.load(context, self._options)
        denoiser = loading.denoiser(pipeline)
        self._adapters = BatchedAdapters(denoiser, part="", idle=self._options.idle_loras)
        self._runner = self._with_image = Runner(pipeline, self._options)
        if not self._runner.arguments.takes("image"):
            twin = loading.image_pipeline(pipeline)
            self._with_image = self._runner if twin is None else Runner(twin, self._options)
        self._pace = Pace()

    def _new_request(self, request: base.StageRequest) -> _Request:
        return _Request(request)

    def _take(self, request: _Request, chunk: base.Chunk) -> None:
        if not request.prompt.feed(chunk):
            return
        text = user_text(request.prompt)
        if len(text) > PROMPT_CHARACTERS:
            message = f"messages: the prompt has {len(text)} characters; the limit is {PROMPT_CHARACTERS}"
            raise beyond_context(message)
        with request_work("image"):
            pictures = user_pictures(request.prompt, self._options.max_images, self._options.max_pixels)
        request.prompt = OmniPrompt(())
        runner = self._with_image if pictures else self._runner
        request.arguments = runner.arguments.make(request.params, text, pictures)
        request.runner = runner

    def step(self) -> Iterator[base.StageOutput | base.StageFailure]:
        """Compute the next step of a request, or put out a frame of one that is computed."""
        request = self._next()
        try:
            with request_work(), nullcontext() if request.pictures is not None else self._pace.measured():
                output = self._advance(request)
        except base.InvalidRequest as error:
            self.abort(request.id)
            yield base.StageFailure(request.id, blamed(error))
            return
        if output is not None:
            if output.last:
                self.abort(request.id)
            yield output

    def gauges(self) -> Mapping[str, float]:
        """Return the figures of the requests and of their pace (``pace.Pace``). A step brings one of them forward."""
        called = [each for each in self._requests.values() if each.call is not None and each.total]
        steps_left = [request.total - request.step for request in called]
        part = min(len(steps_left), 1)
        return self._pace.gauges(steps_left, taking_part=part, waiting=len(self._requests) - part)

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
                request.call = PipelineCall(request.runner, request.arguments, request.params, request.step_seen)
            with self._adapters.applied([request.adapter]):
                made = request.call.advance()
            if isinstance(made, Step):
                return self._after(request, made)
            request.call, request.pictures = None, made
        return self._picture(request, request.pictures)

    def _after(self, request: _Request, done: Step) -> base.StageOutput | None:
        request.step, request.total = done.step, done.total
        if not done.shown:
            return None
        data = {"step": done.step, "total": done.total, "final": False}
        tensors = {} if done.preview is None else {"image": done.preview}
        partial = done.step <= request.step_seen
        return base.StageOutput(request.id, tensors, data, decisions=(done.step,), partial=partial)

    def _picture(self, request: _Request, pictures: Pictures) -> base.StageOutput:
        data: dict[str, Any] = {"step": request.total, "total": request.total, "final": True}
        if pictures.is_video:
            data |= {"frame": request.sent, "frames": len(pictures)}
        picture = pictures[request.sent]
        request.sent += 1
        last = request.sent == len(pictures)
        return base.StageOutput(request.id, {"image": picture}, data, last, decisions=(request.total,))

    def abort(self, request_id: base.RequestId) -> None:
        """Forget a request. Its call ends here, so its memory is free at once."""
        request = self._requests.get(request_id)
        if request is not None and request.call is not None:
            request.call.cancel()
        super().abort(request_id)

    def close(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)
        del self._runner, self._with_image, self._adapters
