"""LoRA adapters of an engine on vLLM, which applies them itself: ``engine_args: {enable_lora: true}``.

Rules
1. vLLM knows an adapter by a number and a name. Each version gets its own, so that a request keeps the version with
   which it began.
2. vLLM keeps ``max_cpu_loras`` adapters in memory and reads others again when they are needed. Each time, the worker
   checks that their files are those that were added (``StageWorker``). A request whose adapter is not in memory fails
   before vLLM reads files that have changed: that step would end the worker, and with it all requests.
3. A pinned adapter stays in that memory, and occupies none of the ``max_loras`` slots of the batch. vLLM's scheduler
   does not ask what is pinned: it may put ``max_loras`` other adapters into one batch. With ``LLMEngine.pin_lora``,
   which occupies a slot too, that step would fail. All adapters of a batch are in memory, so ``max_cpu_loras`` less
   ``max_loras`` can be pinned.
4. What vLLM raises for an adapter that it cannot load becomes ``InvalidAdapter``, with vLLM's message. vLLM takes
   weights of a wrong shape, and numbers that are not finite, which would reach its cache, and from there the answers of
   other requests. So the weights are compared with the model's checkpoint first. Huge ones, with which activations
   overflow, still do that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest

from omni_actors.errors import InvalidAdapter, InvalidRequest
from omni_actors.stages import weights
from omni_actors.stages.adapters import files
from omni_actors.stages.adapters import weights as adapter_weights
from omni_actors.stages.adapters.options import Adapter, KeptAdapters

DISABLED = "its engine_args do not have enable_lora: true"
"""Why an engine on vLLM serves no adapters."""


class VLLMAdapters:
    """The adapters of one ``LLMEngine``: an ``AdapterStore``. Its workers are ``StageWorker``."""

    def __init__(self, llm: Any, model: Path, part: str) -> None:
        """model: the directory of the checkpoint. part: of it, which the model is; "": all of it."""
        self._llm, self._model, self._part = llm, model, part
        self._names: dict[Adapter, LoRARequest] = {}
        """vLLM's name of each version that was loaded and not removed."""
        self._times: dict[Adapter, Any] = {}
        """What ``files.times`` was before the files were last checked."""
        self._may_lack = False
        """Whether vLLM may have removed one of these from its memory."""
        self._kept: set[Adapter] = set()
        self._newest = 0

    @property
    def loaded(self) -> Collection[Adapter]:
        return self._names.keys()

    def name_of(self, adapter: Adapter | None) -> LoRARequest | None:
        """Return what vLLM's ``add_request`` takes. The adapter is in use."""
        return None if adapter is None else self._names[adapter]

    def use(self, adapter: Adapter, in_use: Collection[Adapter]) -> None:
        self.trim({adapter, *in_use})
        self._load(adapter)

    def keep(self, kept: KeptAdapters, in_use: Collection[Adapter]) -> None:
        """As in ``AdapterStore``. Raises InvalidRequest if so many adapters cannot be pinned (rule 3)."""
        pinned = [each for each in kept.adapters if each.name in kept.pinned]
        lora = self._llm.vllm_config.lora_config
        if pinned and len(pinned) > lora.max_cpu_loras - lora.max_loras:
            message = f"{len(pinned)} pinned adapters leave no memory for the other adapters of a batch"
            arguments = f"engine_args.max_cpu_loras is {lora.max_cpu_loras}, and max_loras is {lora.max_loras}"
            raise InvalidRequest(f"{message}; {arguments}", param="pinned")
        before, self._kept = self._kept, set(kept.adapters)
        self.trim(in_use)
        self._pin(pinned)
        for adapter in kept.adapters:
            if adapter in before and adapter not in pinned:
                continue  # vLLM may have evicted it; the next request that names it loads it again
            try:
                self._load(adapter)
            except InvalidAdapter as error:  # the requests that name it are refused
                print(error, file=sys.stderr)
            else:
                self._pin(pinned)

    def trim(self, in_use: Collection[Adapter]) -> None:
        for adapter in self._names.keys() - self._kept - set(in_use):
            del self._times[adapter]
            self._llm.remove_lora(self._names.pop(adapter).lora_int_id)

    def check_again(self, in_use: Collection[Adapter]) -> Iterator[tuple[Adapter, InvalidAdapter]]:
        """Yield those of the adapters in use that vLLM would have to read again, and whose files have changed."""
        if not self._may_lack:
            return
        in_memory = self._llm.list_loras()
        self._may_lack = any(each.lora_int_id not in in_memory for each in self._names.values())
        for adapter in in_use:
            times = files.times(adapter)
            if self._names[adapter].lora_int_id not in in_memory and times != self._times[adapter]:
                try:
                    files.read_again(adapter)
                except InvalidAdapter as error:
                    yield adapter, error
                else:
                    self._times[adapter] = times

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, int]]:
        """The outputs and inputs of the linear layers in the model's checkpoint, if they are as in the model."""
        if self._llm.model_config.quantization is not None:
            return {}
        prefix = f"{self._part}." if self._part else ""
        every = weights.shapes(weights.checkpoint_files(self._model), prefix).items()
        return {name.removeprefix(prefix).removesuffix(".weight"): shape for name, shape in every if len(shape) == 2}

    def _pin(self, pinned: Sequence[Adapter]) -> None:
        """Let exactly these stay in vLLM's memory, as far as they are there."""
        numbers = [self._names[each].lora_int_id for each in pinned if each in self._names]
        self._llm.collective_rpc("pin_adapters", args=(numbers,))

    def _load(self, adapter: Adapter) -> None:
        """Let vLLM load an adapter that is not in its memory. Raises InvalidAdapter."""
        made = self._names.get(adapter)
        if made is not None and made.lora_int_id in self._llm.list_loras():
            return
        times = files.times(adapter)
        adapter_weights.check(files.read_again(adapter), self._shapes, self._part)
        if made is None:
            self._newest += 1
            made = LoRARequest(f"{adapter.name}@{adapter.digest}", self._newest, adapter.directory)
        self._may_lack |= len({*self._names, adapter}) > self._llm.vllm_config.lora_config.max_cpu_loras
        try:
            self._llm.add_lora(made)
        except Exception as error:
            self._llm.remove_lora(made.lora_int_id)  # a part of it may be there
            if isinstance(error, InvalidAdapter):
                raise
            raise InvalidAdapter(adapter.directory, f"vLLM: {error}") from error
        self._names[adapter], self._times[adapter] = made, times


def load_checked(load: Callable[[LoRARequest], Any], request: LoRARequest) -> Any:
    """Let vLLM load an adapter. Raises InvalidAdapter if its files are not those that were added."""
    name, _, digest = request.lora_name.rpartition("@")
    adapter = Adapter(name, request.lora_path, digest)
    times = files.times(adapter)
    files.read_again(adapter)
    loaded = load(request)
    if files.times(adapter) != times:
        raise InvalidAdapter(adapter.directory, f"the files of {name!r} have changed while vLLM read them")
    return loaded
