"""The methods of ``OmniSystem`` that submit requests."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, overload

import msgspec

from omni_actors import prompts as prompt_inputs
from omni_actors.config import Pipeline
from omni_actors.errors import InvalidRequest, RequestError
from omni_actors.generation import Generation
from omni_actors.generations import Generations
from omni_actors.media import MultiModalData
from omni_actors.orchestrator.orchestrator import Orchestrator
from omni_actors.orchestrator.pieces import Input, Inputs, Segments
from omni_actors.orchestrator.request import OnFailure
from omni_actors.orchestrator.routes import Node, Route, plan, reachable
from omni_actors.outputs import Answer
from omni_actors.prompts import Prompt
from omni_actors.system import batch, capabilities, pictures
from omni_actors.system.calls import are_names
from omni_actors.system.ended import EndedRequests
from omni_actors.system.loras import LoraTable
from omni_actors.system.parameters import Parameters
from omni_actors.system.terms import OutputKind, SamplingParams, Terms


class PreparedRequest(NamedTuple):
    """A request before it is submitted. copies: those that ``n`` makes of one prompt. position: of the prompt."""

    inputs: Inputs
    terms: Terms
    params: Mapping[str, Any]
    copies: int = 1
    position: int = 0


class Requests:
    """The methods of ``OmniSystem`` that submit requests."""

    pipeline: Pipeline
    _orchestrator: Orchestrator
    _loras: LoraTable
    _ended: EndedRequests

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self._nodes = {
            name: Node(accepts=s.accepts, inputs=s.inputs, emits=s.emits) for name, s in pipeline.stages.items()
        }
        self._route = functools.cache(functools.partial(plan, self._nodes))
        self._reachable = functools.lru_cache(functools.partial(reachable, self._nodes))
        self._parameters = Parameters(pipeline)
        super().__init__()

    @overload
    def generate(
        self,
        /,
        prompt: Prompt | AsyncIterable[str] | None = None,
        *,
        multi_modal_data: MultiModalData | None = None,
        image: Any = None,
        script: str | AsyncIterable[str] | None = None,
        n: None = None,
        modalities: Sequence[str] | None = None,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        deadline_s: float | None = None,
        on_failure: OnFailure = "replay",
        priority: int | None = None,
        arrival_time: float | None = None,
        output_kind: OutputKind = "delta",
        trace_headers: Mapping[str, str] | None = None,
        session: str | None = None,
        **params: Any,
    ) -> Generation: ...

    @overload
    def generate(self, /, prompt: Sequence[Prompt], **arguments: Any) -> Generations: ...

    @overload
    def generate(self, /, prompt: Prompt | None = None, *, n: int, **arguments: Any) -> Generations: ...

    def generate(
        self,
        /,
        prompt: Prompt | Sequence[Prompt] | AsyncIterable[str] | None = None,
        *,
        multi_modal_data: MultiModalData | None = None,
        image: Any = None,
        script: str | AsyncIterable[str] | None = None,
        n: int | None = None,
        **arguments: Any,
    ) -> Generation | Generations:
        """Submit a request. It returns at once; reading the returned object reads the answer.

        Args:
            prompt: A question, a conversation (see ``Messages``), or a raw prompt that bypasses the chat template:
                ``{"prompt": text}``, ``{"prompt_token_ids": ids}`` or ``{"prompt_embeds": array}`` (see ``prompts``).
                An iterator of the parts of a question is read to its end before a language model begins. A list of
                prompts makes a request of each.
            multi_modal_data: ``{"audio": AudioChunk, "image": …, "video": …}``, for each kind one item or a list; see
                ``media.MultiModalData``. A question follows all of them; a conversation refers to them by index.
            image: A picture, or a list of pictures, in place of ``{"image": …}`` in multi_modal_data.
            script: Text that is spoken as it is. It replaces the prompt. It may be an asynchronous iterator of parts,
                cut anywhere: each sentence is spoken as soon as it is complete. (See ``submit`` for iterators.)
            n: Make this many requests of each prompt, with the seeds seed, seed + 1, … (or drawn ones). If an engine of
                the request has a parameter n, as vLLM's do, n is that parameter, and makes no further requests.
            arguments: Those of ``submit``: modalities, sampling_params, request_id, deadline_s, on_failure, priority,
                arrival_time, output_kind, trace_headers, session, and parameters of the engines, such as max_tokens or
                seed.

        Returns:
            The answer; for a list or with n, ``Generations``. Dropping it aborts the request. The inputs must not
            change before the request has ended.

        Raises:
            InvalidRequest: An argument is wrong, or no route leads from the input to the modalities.
            Unsupported: A stage of the route cannot do what is asked, or no stage has the LoRA adapter.
            Overloaded: ``limits.max_requests`` requests are in flight. A request never waits for admission; ``map``
                submits any number of prompts without this error.
            Quarantined: The same request has ended workers a short time ago.
            StageUnavailable: A stage that the request needs has failed.
        """
        media = {"multi_modal_data": multi_modal_data, "image": image, "script": script}
        if prompt_inputs.is_list_of_prompts(prompt):
            if any(each is not None for each in media.values()):
                message = "prompt: in a list, each prompt brings its own multi_modal_data, and there is no script"
                raise InvalidRequest(message, param="prompt")
            all_prepared = [
                request
                for index, each in enumerate(prompt)
                for request in self._prepare_each(index, each, n, arguments)
            ]
            return self._submit_each(all_prepared)
        requests = self._expand_n(self._prepare(prompt, **media, **arguments), n)
        is_one = n is None or "n" in requests[0].params
        return self._submit_one(requests[0]) if is_one else self._submit_each(requests)

    def _prepare_each(
        self, index: int, prompt: Any, n: int | None, arguments: Mapping[str, Any]
    ) -> list[PreparedRequest]:
        """Return the requests that ``generate`` makes of one prompt of a list. index: its position."""
        try:
            return self._expand_n(self._prepare(prompt, **arguments)._replace(position=index), n)
        except RequestError as error:
            error.index = index
            raise

    def _prepare(
        self,
        prompt: Any,
        *,
        multi_modal_data: MultiModalData | None = None,
        image: Any = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        script: str | AsyncIterable[str] | None = None,
        **arguments: Any,
    ) -> PreparedRequest:
        """Return what ``generate`` asks for with one prompt."""
        inputs = prompt_inputs.pieces(prompt, multi_modal_data, image)
        if script is not None:
            inputs["script"] = prompt_inputs.script(script)
        params = {**arguments, **prompt_inputs.processor_kwargs(prompt, mm_processor_kwargs)}
        terms = Terms(**{name: params.pop(name) for name in Terms.__struct_fields__ if name in params})
        if (kind := prompt_inputs.raw_kind(prompt)) is not None:
            capabilities.require_raw_prompt(self.pipeline, self._plan_route(inputs, terms.modalities), kind)
        return PreparedRequest(inputs, terms, params)

    def _expand_n(self, prepared: PreparedRequest, n: int | None) -> list[PreparedRequest]:
        """Return the requests that make ``n`` answers to a prompt. An engine with a parameter n makes them in one."""
        if n is None:
            return [prepared]
        route = self._plan_route(prepared.inputs, prepared.terms.modalities)
        schemas = [self.pipeline.spec(stage).params for stage in route.stages]
        if any(schema is not None and "n" in schema.__struct_fields__ for schema in schemas):
            return [prepared._replace(params={**prepared.params, "n": n})]
        count = pictures.check_count(n, self.pipeline.limits.max_requests)
        pictures.check_repeatable(prepared.inputs)
        seeds = [pictures.seed_of(prepared.params.get("seed"), index) for index in range(count)]
        return [prepared._replace(params={**prepared.params, "seed": seed}, copies=count) for seed in seeds]

    def _submit_each(self, requests: Sequence[PreparedRequest]) -> Generations:
        """Submit all of the requests, or none of them."""
        members: list[Generation] = []
        try:
            for index, prepared in enumerate(requests):
                if (name := prepared.terms.request_id) is not None:
                    name = f"{name}-{index}"
                terms = msgspec.structs.replace(prepared.terms, request_id=name)
                members.append(self._submit_one(prepared._replace(terms=terms)))
        except BaseException as error:
            for member in members:
                member.abort()
            if isinstance(error, RequestError):
                error.index = prepared.position
            raise
        return Generations(members)

    def map(
        self,
        /,
        prompts: Iterable[Prompt],
        *,
        concurrency: int | None = None,
        keep_errors: bool = False,
        **arguments: Any,
    ) -> AbstractAsyncContextManager[AsyncIterator[Answer]]:
        """Answer many prompts, several at a time, without exceeding ``limits.max_requests``.

        Args:
            prompts: Questions, conversations or raw prompts. They are taken from the iterable as they are needed.
            concurrency: Requests at a time, from 1 on; at most, and by default, ``limits.max_requests``.
            keep_errors: False: the loop raises the error of the first request that fails. True: it continues, and
                returns such a request as an ``Answer`` with its ``error``.
            arguments: Those of ``generate``, for every prompt: modalities, deadline_s, max_tokens, …

        Returns:
            A block with an iterator. The answers come in the order in which they are complete; ``Answer.index`` is the
            position of the prompt. If other callers fill the system, ``map`` waits instead of raising ``Overloaded``.
            Leaving the block, also by an exception or cancellation, aborts the requests that are not complete.

        >>> async def main():
        ...     async with OmniSystem.open("echo") as omni, omni.map(["a", "b", "c"], concurrency=2) as answers:
        ...         return {answer.index: answer.text async for answer in answers}
        >>> sorted(trio.run(main).items())
        [(0, 'a'), (1, 'b'), (2, 'c')]
        """
        most = self.pipeline.limits.max_requests
        return batch.answers(
            lambda prompt: self.generate(prompt, **arguments),
            prompts,
            concurrency=batch.checked_concurrency(concurrency, most),
            keep_errors=keep_errors,
        )

    def submit(
        self,
        /,
        inputs: Mapping[str, Sequence[Input] | AsyncIterable[Input] | Segments],
        modalities: Sequence[str] | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        deadline_s: float | None = None,
        on_failure: OnFailure = "replay",
        priority: int | None = None,
        arrival_time: float | None = None,
        output_kind: OutputKind = "delta",
        trace_headers: Mapping[str, str] | None = None,
        session: str | None = None,
        **params: Any,
    ) -> Generation:
        """Submit a request for a pipeline of your own.

        Args:
            inputs: Pieces of input, by the kinds that the pipeline's stages accept: a list, or an asynchronous iterator
                for pieces that arrive while the request runs. One task reads it, at most as fast as the stages take its
                pieces, and closes it when the request ends. Its end ends the input; an exception ends the request with
                ``InputFailed``. A replay sends the pieces again; beyond ``limits.retain_bytes`` they are not kept.
            modalities, sampling_params, request_id, deadline_s, on_failure, priority, arrival_time, output_kind,
                trace_headers, session: See ``Terms``.
            params: Parameters of the engines, such as max_tokens, temperature, seed or speed; ``lora`` is the name of a
                LoRA adapter (see ``add_lora``). None means not given.

        Returns and raises what ``generate`` does.
        """
        terms = Terms(
            modalities=modalities,
            sampling_params=sampling_params,
            request_id=request_id,
            deadline_s=deadline_s,
            on_failure=on_failure,
            priority=priority,
            arrival_time=arrival_time,
            output_kind=output_kind,
            trace_headers=trace_headers,
            session=session,
        )
        if not isinstance(inputs, Mapping):
            raise InvalidRequest(f"inputs: expected a mapping from kinds, found {inputs!r:.200}", param="inputs")
        pieces = {kind: prompt_inputs.live(given) for kind, given in inputs.items()}
        return self._submit_one(PreparedRequest(pieces, terms, params))

    def _submit_one(self, prepared: PreparedRequest) -> Generation:
        inputs, terms, params = prepared.inputs, prepared.terms, pictures.with_named_size(prepared.params)
        route = self._plan_route(inputs, terms.modalities)
        by_stage = self._parameters.by_stage(route.stages, params, terms)
        work = pictures.checked_work(self.pipeline, by_stage, params, prepared.copies)
        self._loras.resolve(by_stage)
        stream = self._orchestrator.submit(
            inputs=inputs,
            route=route,
            params=by_stage,
            work=work,
            deadline_s=self.pipeline.limits.deadline_s if terms.deadline_s is None else terms.deadline_s,
            name=terms.request_id,
            on_failure=terms.on_failure,
            priority=terms.priority or 0,
            waited_s=terms.waited_s,
            session=terms.session,
        )
        if (tracing := self._ended.tracing) is not None:
            stream.request.trace = tracing.context(terms.trace_headers)
        return Generation(
            stream,
            self.pipeline,
            self._ended.answered,
            on_interval=self._ended.interval,
            speech=self._ended.speech,
            cumulative=terms.output_kind == "cumulative",
        )

    def _plan_route(self, inputs: Inputs, modalities: Sequence[str] | None) -> Route:
        kinds = frozenset(kind for kind, pieces in inputs.items() if pieces)
        if modalities is None:
            reached = self._reachable(kinds)
            modalities = [each for each in self.pipeline.modalities or ("text",) if each in reached] or reached
        elif not are_names(modalities):
            example = modalities if isinstance(modalities, str) else "text"
            message = f"modalities: expected a sequence of names such as ({example!r},), found {modalities!r:.200}"
            raise InvalidRequest(message, param="modalities")
        return self._route(kinds, frozenset(modalities))
