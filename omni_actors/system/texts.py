"""Texts of a running system beside answers: tokens and embeddings.

Rules
1. Tokens are asked of an engine between two of its steps (``Control.call``): they take no place in a batch.
2. An embedding is a request like any other: admitted, batched, and computed again after the death of a worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import trio

from omni_actors.config import Pipeline
from omni_actors.errors import InvalidRequest, Overloaded, Unsupported, WorkerLost
from omni_actors.prompts import is_list_of_prompts
from omni_actors.supervisor.calls import PendingCall, Reply
from omni_actors.system.calls import CALL_TIMEOUT_S
from omni_actors.system.control import Control

if TYPE_CHECKING:
    from omni_actors.generation import Generation

Pooling = Literal["mean", "last"]
ENCODE, TOKENIZE, DETOKENIZE = "encode", "tokenize", "detokenize"
_TEMPLATE = "chat_template_kwargs"


class Tokens(msgspec.Struct, frozen=True):
    """The tokens of a prompt.

    Attributes:
        tokens: Their ids.
        token_strs: Their texts in the tokenizer's own writing.
        max_model_len: Most tokens of a prompt and its answer.
    """

    tokens: list[int]
    token_strs: list[str]
    max_model_len: int


class Embedding(msgspec.Struct, frozen=True):
    """The embedding of a text.

    Attributes:
        vector: float32 (hidden,).
        prompt_tokens: Number of tokens of the text.
    """

    vector: np.ndarray[Any, np.dtype[np.float32]]
    prompt_tokens: int


class TextControl(Control):
    """The methods of ``OmniSystem`` about tokens and embeddings."""

    pipeline: Pipeline

    if TYPE_CHECKING:

        def generate(self, /, *args: Any, **kwargs: Any) -> Generation: ...

    async def encode(
        self,
        /,
        texts: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]],
        *,
        pooling: Pooling = "mean",
        normalize: bool = True,
        **arguments: Any,
    ) -> list[Embedding]:
        """Return the embeddings of texts: pooled hidden states of a language model.

        Args:
            texts: One or several. A text is taken as it is, without the chat template; a mapping is a raw prompt or a
                conversation, as ``generate`` takes it.
            pooling: "mean" of all positions, or the "last" one.
            normalize: Whether the vectors get the length 1.
            arguments: More ones of ``generate``, for each text: deadline_s, on_failure, lora.

        Returns:
            The embeddings in the order of the texts. As many texts run at a time as ``limits.max_requests`` admits;
            while other callers fill the system, the texts wait.

        Raises:
            Unsupported: No stage makes embeddings.
            InvalidRequest: An argument is wrong. A text is a list of prompts, or there is an ``n``: each text has one
                embedding.
            RequestError: The error of a text that failed. The others are aborted then, as by a cancellation.
        """
        modality = self._emitted_by_encoder()
        given = [texts] if isinstance(texts, str | Mapping) else _listed("texts", texts)
        if any(is_list_of_prompts(text) for text in given):
            raise InvalidRequest("texts: no list of texts was expected within the list", param="texts")
        if arguments.get("n") is not None:
            raise InvalidRequest("n: each text has one embedding; accepted: no n", param="n")
        prompts = [{"prompt": text} if isinstance(text, str) else text for text in given]
        found: dict[int, Embedding] = {}
        failures: list[Exception] = []  # raised outside the nursery, so that no exception group wraps them
        numbered = enumerate(prompts)

        async def work() -> None:
            try:
                for index, prompt in numbered:
                    found[index] = await self._embed(prompt, modality, pooling, normalize, arguments)
            except Exception as error:  # noqa: BLE001 - of the request, or a wrong argument
                failures.append(error)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for _ in range(min(len(prompts), self.pipeline.limits.max_requests)):
                nursery.start_soon(work)
        if failures:
            raise failures[0]
        return [found[index] for index in range(len(prompts))]

    async def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Iterable[Mapping[str, Any]] | None = None,
        tools: Iterable[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = True,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Tokens:
        """Return the tokens of a raw text, or of a conversation as the chat template renders it.

        Args:
            prompt: The text. Either this or ``messages`` is given.
            messages: The conversation, as ``generate`` takes it.
            tools: The functions that the conversation's model may call.
            chat_template_kwargs: Variables of the chat template; by default those of the stage's ``defaults``.
            add_special_tokens: Whether the tokenizer adds its own special tokens to ``prompt``.
            timeout_s: Seconds to wait for an engine.

        Raises:
            InvalidRequest: An argument is wrong, or larger than a call can send.
            Unsupported: No stage that reads prompts answers for its tokenizer.
            CallError: No replica answered in time.
        """
        arguments: dict[str, Any] = {"add_special_tokens": add_special_tokens, "tools": _listed("tools", tools)}
        arguments |= {"prompt": prompt, "messages": None if messages is None else _listed("messages", messages)}
        if chat_template_kwargs is None:
            defaults = [stage.defaults for stage in self.pipeline.stages.values() if "messages" in stage.accepts]
            chat_template_kwargs = next((each[_TEMPLATE] for each in defaults if _TEMPLATE in each), {})
        if chat_template_kwargs:  # an engine of another package may not know them
            arguments[_TEMPLATE] = chat_template_kwargs
        return msgspec.convert(await self._ask_reader(TOKENIZE, arguments, timeout_s), Tokens)

    async def detokenize(self, tokens: Iterable[int], *, timeout_s: float = CALL_TIMEOUT_S) -> str:
        """Return the text of tokens, special tokens included. Raises as ``tokenize``."""
        return str(await self._ask_reader(DETOKENIZE, {"tokens": _listed("tokens", tokens)}, timeout_s))

    def _emitted_by_encoder(self) -> str:
        """Return what the stage that makes embeddings emits. Raises Unsupported."""
        readers = [name for name, stage in self.pipeline.stages.items() if "messages" in stage.accepts]
        for name in readers:
            schema, emits = self.pipeline.spec(name).params, self.pipeline.stages[name].emits
            if schema is not None and "pooling" in schema.__struct_fields__ and emits is not None:
                return emits
        stage = next(iter(readers or self.pipeline.stages))
        raise Unsupported(stage, ENCODE, f"its engine {self.pipeline.stages[stage].engine!r} makes no embeddings")

    async def _embed(
        self, prompt: Any, modality: str, pooling: str, normalize: bool, arguments: Mapping[str, Any]
    ) -> Embedding:
        while True:
            try:
                generation = self.generate(
                    prompt, modalities=(modality,), pooling=pooling, normalize=normalize, **arguments
                )
                outputs = [output async for output in generation]
            except Overloaded as error:  # by other callers
                await trio.sleep(error.retry_after_s)
                continue
            [last] = [output for output in outputs if "embedding" in output.tensors]
            return Embedding(last.tensors["embedding"].numpy(), last.data["prompt_tokens"])

    async def _ask_reader(self, capability: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        """Return the value of the first stage that reads prompts and has the capability. Raises as ``tokenize``.

        Of a stage's replicas, the first value is enough: none of them waits for one that does not answer.
        """
        readers = [name for name, stage in self.pipeline.stages.items() if "messages" in stage.accepts]
        if not readers:
            raise Unsupported(next(iter(self.pipeline.stages)), capability, "no stage reads prompts")
        calls = self._begin_calls(capability, arguments, self._stages(readers), timeout_s)
        if not calls:
            raise WorkerLost(readers[0], None, capability, None)
        replies: dict[str, list[Reply]] = {}
        for stage in readers:
            replies[stage] = await _until_value([call for call in calls if call.address.stage == stage])
            if any(reply.error is None for reply in replies[stage]):
                break
        return first_value(replies)


def _listed(param: str, given: Any) -> list[Any]:
    """Return the items of an argument. Raises InvalidRequest: it has none."""
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise InvalidRequest(f"{param}: expected a list, found {given!r:.200}", param=param)
    return list(given)


def first_value(replies: Mapping[str, Sequence[Reply]]) -> Any:
    """Return the first value of a replica; without one, raise the error that says most about the arguments.

    At least one replica has replied.
    """
    every = [reply for stage in replies.values() for reply in stage]
    for reply in every:
        if reply.error is None:
            return reply.value
    errors = [reply.error for reply in every if reply.error is not None]
    raise min(errors, key=lambda error: (isinstance(error, Unsupported), not isinstance(error, InvalidRequest)))


async def _until_value(calls: Sequence[PendingCall]) -> list[Reply]:
    """Wait for the replies to calls, until one of them has a value."""
    replies: list[Reply] = []

    async def wait(call: PendingCall) -> None:
        replies.append(reply := await call.wait())
        if reply.error is None:
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for call in calls:
            nursery.start_soon(wait, call)
    return replies
