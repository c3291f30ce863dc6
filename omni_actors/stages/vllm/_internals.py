"""The unpublished names of vLLM that this package uses, and a check that they exist.

The versions in ``VERSIONS`` are known to work. Another version may work; if it lacks names, the check lists them.

Hidden states use the mechanism that vLLM has for EAGLE-3 drafters (Li et al., 2025): a model keeps the inputs and
outputs of chosen layers, and the model runner keeps them from the forward until the tokens are sampled.
``HiddenStateWorker`` copies them there, also for prefill chunks, with the request and position of each row.

A request that begins behind tokens of its answer looks like one that vLLM has preempted: the scheduler and the output
processor get the tokens in ``replay``, the model runner's state of the request in ``StageWorker``.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm import ModelRegistry, PoolingParams
from vllm.platforms import current_platform

from omni_actors.stages.vllm.adapters import load_checked
from omni_actors.stages.vllm.decided import tokens_at_once
from ringbuf.syscalls import memfd_create

VERSIONS = ("0.32.0",)
NAMES = (
    "vllm.v1.engine:EngineCoreRequest.resumable",
    "vllm.v1.engine.core_client:InprocClient.abort_requests",
    "vllm.v1.engine.core_client:InprocClient.add_request",
    "vllm.v1.engine.core_client:InprocClient.get_output",
    "vllm.v1.engine.core_client:InprocClient.shutdown",
    "vllm.model_executor.layers.pooler:DispatchPooler.for_embedding",
    "vllm.model_executor.models.qwen3_moe:Qwen3MoeModel.load_weights",
    "vllm.v1.request:Request.append_output_token_ids",
    "vllm.v1.request:Request.take_prefill_stats",
    "vllm.v1.core.sched.scheduler:Scheduler.add_request",
    "vllm.v1.request:Request.get_finished_reason",
    "vllm.logprobs:append_logprobs_for_next_position(rank)",
    "vllm.v1.core.sched.utils:check_stop(max_model_len)",
    "vllm.v1.engine.logprobs:LogprobsProcessor.logprobs",
    "vllm.v1.structured_output:StructuredOutputManager.accept_tokens",
    "vllm.v1.structured_output.backend_types:StructuredOutputGrammar.accept_tokens(tokens)",
    "vllm.v1.structured_output.backend_types:StructuredOutputGrammar.fill_bitmask(batch_index)",
    "vllm.v1.structured_output.backend_types:StructuredOutputGrammar.rollback(num_tokens)",
    "vllm.v1.structured_output.backend_types:StructuredOutputGrammar.validate_tokens(tokens)",
    "vllm.v1.structured_output:StructuredOutputManager.clear_backend",
    "vllm.v1.structured_output.request:StructuredOutputRequest.grammar",
    "vllm.v1.structured_output.request:StructuredOutputRequest._grammar",
    "vllm.v1.engine:EngineCoreOutput.new_token_ids",
    "vllm.v1.engine:EngineCoreOutput.stop_reason",
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs(iteration_stats)",
    "vllm.v1.engine.output_processor:OutputProcessorOutput.request_outputs",
    "vllm.v1.worker.gpu_input_batch:InputBatch.add_request(request)",
    "vllm.v1.worker.gpu_input_batch:CachedRequestState.output_token_ids",
    "vllm.v1.worker.gpu_input_batch:CachedRequestState.generator",
    "vllm.v1.core.sched.output:SchedulerOutput.scheduled_new_reqs",
    "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_native(generators)",
    "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_cpu(generators)",
    "vllm.renderers.base:BaseRenderer.shutdown",
    "vllm.model_executor.models.registry:_LazyRegisteredModel.load_model_cls",
    "vllm.v1.worker.gpu_worker:Worker.__init__(vllm_config)",
    "vllm.v1.worker.gpu_worker:Worker.__init__(distributed_init_method)",
    "vllm.v1.worker.gpu_worker:Worker.load_model",
    "vllm.v1.worker.gpu_worker:Worker.execute_model",
    "vllm.v1.worker.gpu_worker:Worker.sample_tokens",
    "vllm.v1.worker.cpu_worker:CPUWorker.load_model",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model",
    "vllm.v1.worker.gpu_model_runner:ExecuteModelState.hidden_states",
    "vllm.v1.worker.gpu_model_runner:ExecuteModelState.aux_hidden_states",
    "vllm.v1.worker.gpu_input_batch:InputBatch.req_ids",
    "vllm.v1.core.sched.output:SchedulerOutput.num_scheduled_tokens",
    "vllm.model_executor.models.interfaces:EagleModelMixin._set_aux_hidden_state_layers",
    "vllm.multimodal.inputs:MultiModalKwargsItems.from_hf_inputs",
    "vllm.multimodal.inputs:PlaceholderRange.offset",
    "vllm.multimodal.inputs:MultiModalFieldConfig.batched(keep_on_cpu)",
    "vllm.model_executor.models.qwen2_5_omni_thinker:create_qwen2_5_omni_thinker_field_factory",
    "vllm.utils.cache:LRUCache.pin(key)",
    "vllm.utils.cache:LRUCache.popitem(remove_pinned)",
    "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter(lora_request)",
    "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_linear",
    "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_logits",
    "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU.add_lora_embedding",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.on_new_request",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_transfer_results",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.bind_kv_cache_manager",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids",
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids",
    "vllm.v1.metrics.reader:Counter.value",
    "vllm.v1.metrics.reader:Gauge.value",
    "vllm.v1.metrics.reader:Histogram.count",
    "vllm.v1.metrics.reader:Histogram.sum",
)
"""Names that are looked up when this module is imported; ``function(parameter)`` is a function's parameter."""
RUNNER_ATTRIBUTES = (
    "use_aux_hidden_state_outputs",
    "execute_model_state",
    "input_batch",
    "discard_request_mask",
    "sampler",
)
TIMES = ("time_to_first_token_seconds", "inter_token_latency_seconds", "request_queue_time_seconds")
"""The histograms of vLLM whose means are of interest beside those of the stages (``omni_stage_…``)."""
BATCH_ATTRIBUTES = ("req_ids", "req_id_to_index", "num_computed_tokens_cpu", "num_reqs", "generators", "vocab_size")
"""Attributes of instances, which are looked up when the weights are loaded."""
LORA_MEMORY = "lora_manager._adapter_manager._registered_adapters"
"""Where the model runner has the adapters that are in host memory, if it serves adapters."""


class UnsupportedVLLMVersion(ImportError):
    """The installed vLLM lacks names that this package uses.

    names: the missing ones. version: the installed one. known: versions that are known to work.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.version, self.known = tuple(names), vllm.__version__, VERSIONS
        super().__init__(
            f"vLLM {vllm.__version__} has no {', '.join(names)}; known to work: vLLM {', '.join(VERSIONS)}"
        )


def check() -> None:
    """Raise UnsupportedVLLMVersion if the installed vLLM lacks one of ``NAMES``."""
    if missing := [name for name in NAMES if not _exists(name)]:
        raise UnsupportedVLLMVersion(missing)


def _exists(name: str) -> bool:
    path, _, parameter = name.removesuffix(")").partition("(")
    end = max(path.rfind("."), path.rfind(":"))
    attribute = path[end + 1 :]
    try:
        owner: Any = resolve_name(path[:end])
    except (ImportError, AttributeError):
        return False
    if not hasattr(owner, attribute):
        return attribute in getattr(owner, "__annotations__", {})
    return not parameter or parameter in inspect.signature(getattr(owner, attribute)).parameters


def register_in_process(architectures: Sequence[str]) -> None:
    """Register these model classes by class, so that vLLM need not inspect them in a process of its own.

    vLLM knows its models by name only and imports each in a subprocess to inspect it, which takes seconds.
    """
    for name in architectures:
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def close(llm: Any) -> None:
    """Free what an ``LLMEngine`` in this process has, including its threads."""
    llm.engine_core.shutdown()
    llm.renderer.shutdown()


def engine_metrics(llm: Any) -> dict[str, float]:
    """Return the figures of an ``LLMEngine`` that keeps statistics.

    They are its single-valued counters and gauges, and the count and the sum of each histogram of ``TIMES``.
    """
    figures: dict[str, float] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:")
        if isinstance(metric, _Histogram) and name in TIMES:
            figures |= {f"{name}_count": float(metric.count), f"{name}_sum": float(metric.sum)}
        elif isinstance(metric, (_Counter, _Gauge)) and metric.labels.keys() <= {"engine", "model_name"}:
            figures[name] = float(metric.value)
    return figures


@contextmanager
def without_figures(llm: Any) -> Iterator[None]:
    """Leave what an ``LLMEngine`` does meanwhile out of its figures."""
    logger, llm.logger_manager = llm.logger_manager, None
    try:
        yield
    finally:
        llm.logger_manager = logger


@dataclass(frozen=True)
class HiddenStates:
    """The hidden states of one request at k neighbouring positions, from one forward."""

    request: str
    """vLLM's internal id: what ``add_request`` returned."""
    position: int
    """The first position."""
    layers: Tensor
    """(k, layers, hidden): the input of the first layer (layer 0), or a layer's output before the final norm."""
    last: Tensor
    """(k, hidden): the model's output, after the final norm."""

    def __len__(self) -> int:
        return len(self.last)

    def since(self, position: int) -> HiddenStates:
        """Drop the positions before ``position``."""
        cut = max(0, position - self.position)
        return HiddenStates(self.request, self.position + cut, self.layers[cut:], self.last[cut:])

    def until(self, position: int) -> HiddenStates:
        """Drop the positions from ``position`` on."""
        count = max(0, position - self.position)
        return HiddenStates(self.request, self.position, self.layers[:count], self.last[:count])


check()  # before the lookups below, whose errors would not list all missing names

omni_fields: Any = resolve_name(
    "vllm.model_executor.models.qwen2_5_omni_thinker:create_qwen2_5_omni_thinker_field_factory"
)
"""spatial_merge_size -> features -> how vLLM cuts each of them into items."""
MultiModalKwargsItems: Any = resolve_name("vllm.multimodal.inputs:MultiModalKwargsItems")
PlaceholderRange: Any = resolve_name("vllm.multimodal.inputs:PlaceholderRange")
batched_field: Any = resolve_name("vllm.multimodal.inputs:MultiModalFieldConfig.batched")
_EngineCoreRequest: Any = resolve_name("vllm.v1.engine:EngineCoreRequest")
_Counter: Any = resolve_name("vllm.v1.metrics.reader:Counter")
_Gauge: Any = resolve_name("vllm.v1.metrics.reader:Gauge")
_Histogram: Any = resolve_name("vllm.v1.metrics.reader:Histogram")
_Base: Any = resolve_name(
    "vllm.v1.worker.cpu_worker:CPUWorker" if current_platform.is_cpu() else "vllm.v1.worker.gpu_worker:Worker"
)


class Sessions:
    """Requests whose prompt grows, for an ``LLMEngine`` in this process. vLLM has them for ``AsyncLLM`` only.

    llm: an engine whose model returns hidden states. vLLM answers each chunk once, with the hidden state of its last
    position. Until the next chunk is sent the session waits and keeps its cache blocks.
    """

    def __init__(self, llm: Any) -> None:
        self._core = llm.engine_core
        self._params = PoolingParams(task="embed", use_activation=False)

    def send(self, name: str, ids: list[int]) -> None:
        """Send a session's next chunk, after the answer to the one before. A new name begins a session."""
        self._core.add_request(
            _EngineCoreRequest(
                request_id=name,
                prompt_token_ids=ids,
                mm_features=None,
                sampling_params=None,
                pooling_params=self._params,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
                resumable=True,
            )
        )

    def step(self) -> dict[str, Tensor]:
        """Run one forward; return the hidden state, (hidden,), of each session that it answers."""
        outputs = self._core.get_output().outputs
        return {output.request_id: output.pooling_output for output in outputs if output.pooling_output is not None}

    def end(self, name: str) -> None:
        """End a session and free its cache blocks."""
        self._core.abort_requests([name])


class StageWorker(_Base):  # type: ignore[misc]
    """vLLM's worker. A request may begin behind tokens of its answer (``decided``), and there are four corrections.

    1. A CPU can prefill a seeded request in chunks. vLLM draws a token after each chunk and rewinds the request's
       generator, which raises an exception on a CPU. Here the request has no generator while vLLM draws a token that
       it then discards.
    2. The worker leaves no file behind. vLLM lets its ranks rendezvous at a file in the temporary directory, which a
       killed process never removes. With one rank, anonymous memory takes the place of the file.
    3. On a CPU, a request without a LoRA adapter is not given another request's (``punica``).
    4. An adapter that vLLM reads again must have the files with which it was added.
    """

    def __init__(self, **kwargs: Any) -> None:
        if kwargs["vllm_config"].parallel_config.world_size == 1:
            descriptor = memfd_create("vllm")  # never closed: torch's process group lives as long as the process
            kwargs["distributed_init_method"] = f"file:///proc/self/fd/{descriptor}"
        super().__init__(**kwargs)

    def load_model(self, **kwargs: Any) -> None:
        with _corrected_punica() if current_platform.is_cpu() else nullcontext():
            super().load_model(**kwargs)
        runner = self.model_runner
        missing = [f"model_runner.{name}" for name in RUNNER_ATTRIBUTES if not hasattr(runner, name)]
        batch = runner.input_batch
        missing += [f"model_runner.input_batch.{name}" for name in BATCH_ATTRIBUTES if not hasattr(batch, name)]
        if self.vllm_config.lora_config is not None:
            try:
                self._adapters: Any = attrgetter(LORA_MEMORY)(runner)
                self._pinned: Any = self._adapters.pinned_items
            except AttributeError:
                missing.append(f"model_runner.{LORA_MEMORY}.pinned_items")
            else:
                runner.lora_manager._load_adapter = partial(load_checked, runner.lora_manager._load_adapter)
        if missing:
            raise UnsupportedVLLMVersion(missing)

    def pin_adapters(self, numbers: Sequence[int]) -> None:
        """Let exactly these adapters stay in host memory, of those that are there. They need no slot of the batch."""
        self._pinned.clear()
        for number in numbers:
            if number in self._adapters:
                self._adapters.pin(number)

    def execute_model(self, scheduler_output: Any) -> Any:
        new = {each.req_id: tokens_at_once(each.sampling_params) for each in scheduler_output.scheduled_new_reqs}
        with self._beginning_behind(new) if any(new.values()) else nullcontext():
            return super().execute_model(scheduler_output)

    @contextmanager
    def _beginning_behind(self, new: Mapping[str, list[int]]) -> Iterator[None]:
        """Let new requests that join the batch meanwhile begin behind these tokens."""
        batch = self.model_runner.input_batch
        add_request = batch.add_request

        def add(state: Any) -> Any:
            if tokens := new.get(state.req_id):
                state.output_token_ids += tokens
                self._skip_numbers(state.generator, len(tokens))
            return add_request(state)

        batch.add_request = add
        try:
            yield
        finally:
            del batch.add_request

    def _skip_numbers(self, generator: torch.Generator | None, count: int) -> None:
        """Let vLLM's sampler draw ``count`` tokens with a request's generator, if it has one, and drop them."""
        if generator is None:
            return
        sampler = self.model_runner.sampler.topk_topp_sampler
        # On a CPU a generator gives one number for each token, elsewhere one for each entry of the vocabulary.
        is_one = sampler.forward == sampler.forward_cpu and not sampler.use_fp64_gumbel
        logits = torch.zeros(1, 1 if is_one else self.model_runner.input_batch.vocab_size, device=self.device)
        for _ in range(count):
            sampler(logits, {0: generator}, None, None)

    def sample_tokens(self, grammar_output: Any) -> Any:
        batch = self.model_runner.input_batch
        set_aside: dict[int, Any] = {}
        if batch.generators and current_platform.is_cpu():
            unfinished = self.model_runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
            set_aside = {row: batch.generators.pop(row) for row in unfinished if row in batch.generators}
        output = super().sample_tokens(grammar_output)
        batch.generators.update(set_aside)
        return output


@contextmanager
def _corrected_punica() -> Iterator[None]:
    """Let vLLM use our ``PunicaWrapper`` for the model that is loaded meanwhile."""
    current_platform.get_punica_wrapper = lambda: "omni_actors.stages.vllm.punica.PunicaWrapper"
    try:
        yield
    finally:
        del current_platform.get_punica_wrapper


class HiddenStateWorker(StageWorker):
    """Captures hidden states. ``additional_config["row_layers"]``: of which layers, counted as transformers does."""

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        self._captured: list[HiddenStates] = []
        language = self.model_runner.get_model().get_language_model().model
        language._set_aux_hidden_state_layers(tuple(self.vllm_config.additional_config["row_layers"]))
        self._embed = language.embed_tokens
        self.model_runner.use_aux_hidden_state_outputs = True

    def execute_model(self, scheduler_output: Any) -> Any:
        output = super().execute_model(scheduler_output)
        state = self.model_runner.execute_model_state
        if output is None and state is not None and state.aux_hidden_states is not None:
            self._capture(scheduler_output.num_scheduled_tokens, state)
        return output

    def _capture(self, counts: Any, state: Any) -> None:
        batch, begin = self.model_runner.input_batch, 0
        layers = torch.stack(state.aux_hidden_states, 1)
        for name in batch.req_ids:  # the order of their positions in the forward
            end = begin + counts[name]
            position = int(batch.num_computed_tokens_cpu[batch.req_id_to_index[name]])
            self._captured.append(
                HiddenStates(name, position, layers[begin:end].clone(), state.hidden_states[begin:end].clone())
            )
            begin = end

    def take_hidden_states(self) -> list[HiddenStates]:
        """Return what was captured since the last call."""
        captured, self._captured = self._captured, []
        return captured

    @torch.inference_mode()
    def embed(self, ids: Sequence[int]) -> Tensor:
        """Return rows of the embedding table, (n, hidden)."""
        rows: Tensor = self._embed(torch.as_tensor(ids, device=self.device))
        return rows
