"""All that vLLM does not publish and this package uses, and a check that each of it is there.

Known to work: the versions in ``VERSIONS``; another one may, and says by name what of this moved.

Hidden states come from what the EAGLE-3 drafters read: a model keeps what goes into and comes out of chosen layers, and
the runner holds it from the forward until the tokens are sampled. ``HiddenStateWorker`` copies it there, prompt pieces
included, with the request and the position of each row.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm import ModelRegistry, PoolingParams
from vllm.platforms import current_platform

__all__ = [
    "VERSIONS",
    "HiddenStateWorker",
    "HiddenStates",
    "MultiModalKwargsItems",
    "PlaceholderRange",
    "Sessions",
    "StageWorker",
    "UnsupportedVLLMVersion",
    "check",
    "close",
    "engine_metrics",
    "omni_fields",
    "register_in_process",
]

VERSIONS = ("0.32.0",)
NAMES = (
    "vllm.v1.engine:EngineCoreRequest.resumable",
    "vllm.v1.engine.core_client:InprocClient.abort_requests",
    "vllm.v1.engine.core_client:InprocClient.add_request",
    "vllm.v1.engine.core_client:InprocClient.get_output",
    "vllm.v1.engine.core_client:InprocClient.shutdown",
    "vllm.model_executor.layers.pooler:DispatchPooler.for_embedding",
    "vllm.model_executor.models.qwen3_moe:Qwen3MoeModel.load_weights",
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
    "vllm.model_executor.models.qwen2_5_omni_thinker:create_qwen2_5_omni_thinker_field_factory",
    "vllm.v1.metrics.reader:Counter.value",
    "vllm.v1.metrics.reader:Gauge.value",
)
"""Looked up as this module is imported; of a function's parameter, ``function(parameter)``. What only instances have is
looked at when the weights are there."""
RUNNER = ("use_aux_hidden_state_outputs", "execute_model_state", "input_batch", "discard_request_mask")
BATCH = ("req_ids", "req_id_to_index", "num_computed_tokens_cpu", "num_reqs", "generators")


class UnsupportedVLLMVersion(ImportError):
    """This version of vLLM lacks names that are used here. names: which."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.version, self.known = tuple(names), vllm.__version__, VERSIONS
        super().__init__(
            f"vLLM {vllm.__version__} has no {', '.join(names)}; known to work: vLLM {', '.join(VERSIONS)}"
        )


def check() -> None:
    """Raises UnsupportedVLLMVersion."""
    if moved := [name for name in NAMES if not _is_there(name)]:
        raise UnsupportedVLLMVersion(moved)


def _is_there(name: str) -> bool:
    name, _, parameter = name.removesuffix(")").partition("(")
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError:
        return False
    for part in path.split("."):
        if part in getattr(found, "__annotations__", {}) or part in getattr(found, "__dataclass_fields__", {}):
            return True
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return not parameter or parameter in inspect.signature(found).parameters


def _found(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def register_in_process(architectures: Sequence[str]) -> None:
    """Have vLLM look at these model classes in this process; its way is a second one, which takes some seconds."""
    for name in architectures:
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def close(llm: Any) -> None:
    """Free what an ``LLMEngine`` in this process holds, its threads too."""
    llm.engine_core.shutdown()
    llm.renderer.shutdown()


def engine_metrics(llm: Any) -> dict[str, float]:
    """Of an ``LLMEngine`` that keeps statistics: its counters and gauges of one value each."""
    return {
        metric.name.removeprefix("vllm:"): float(metric.value)
        for metric in llm.get_metrics()
        if isinstance(metric, (_Counter, _Gauge)) and metric.labels.keys() <= {"engine", "model_name"}
    }


@dataclass(frozen=True)
class HiddenStates:
    """Hidden states of one request at k positions, as one forward brought them."""

    request: str
    """vLLM's own id of it: what ``add_request`` gave."""
    position: int
    """The first one."""
    layers: Tensor
    """(k, layers, hidden): what went into the first layer (0) or came out of the others, before the last norm."""
    last: Tensor
    """(k, hidden): what came out of the model, after the last norm."""

    def __len__(self) -> int:
        return len(self.last)

    def since(self, position: int) -> HiddenStates:
        """Without those before it."""
        cut = max(0, position - self.position)
        return HiddenStates(self.request, self.position + cut, self.layers[cut:], self.last[cut:])

    def until(self, position: int) -> HiddenStates:
        """Without it and those behind it."""
        count = max(0, position - self.position)
        return HiddenStates(self.request, self.position, self.layers[:count], self.last[:count])


check()  # before anything below is taken from where it was

omni_fields: Any = _found("vllm.model_executor.models.qwen2_5_omni_thinker:create_qwen2_5_omni_thinker_field_factory")
"""spatial_merge_size -> features -> how each of them is cut into items."""
MultiModalKwargsItems: Any = _found("vllm.multimodal.inputs:MultiModalKwargsItems")
PlaceholderRange: Any = _found("vllm.multimodal.inputs:PlaceholderRange")
_EngineCoreRequest: Any = _found("vllm.v1.engine:EngineCoreRequest")
_Counter: Any = _found("vllm.v1.metrics.reader:Counter")
_Gauge: Any = _found("vllm.v1.metrics.reader:Gauge")
_Base: Any = _found(
    "vllm.v1.worker.cpu_worker:CPUWorker" if current_platform.is_cpu() else "vllm.v1.worker.gpu_worker:Worker"
)


class Sessions:
    """Prompts that grow: what vLLM's ``AsyncLLM`` takes as a stream of input, of an ``LLMEngine`` in this process.

    llm: with a model that answers with hidden states. Each piece that is sent is answered once, by that of its last
    position; until the next one comes the session stands still and keeps its blocks of the cache.
    """

    def __init__(self, llm: Any) -> None:
        self._core = llm.engine_core
        self._params = PoolingParams(task="embed", use_activation=False)

    def send(self, name: str, ids: list[int]) -> None:
        """Once the piece before has been answered. A new name begins a session."""
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
        """One forward; the sessions it answers, each with (hidden,)."""
        outputs = self._core.get_output().outputs
        return {output.request_id: output.pooling_output for output in outputs if output.pooling_output is not None}

    def end(self, name: str) -> None:
        self._core.abort_requests([name])


class StageWorker(_Base):  # type: ignore[misc]
    """vLLM's worker, which on a CPU, too, prefills a request that samples by its own seed in pieces.

    With each piece vLLM draws a token, and turns the request's generator back afterwards: on a CPU that raises. Here
    such a request has no generator while a token is drawn that nobody gets.

    And it leaves no file behind: where ranks would meet, vLLM names one in the temporary directory, and a process that
    is killed never removes it. Where there is one rank, memory without a name does.
    """

    def __init__(self, **kwargs: Any) -> None:
        if kwargs["vllm_config"].parallel_config.world_size == 1:
            descriptor = os.memfd_create("vllm")  # for the life of the process, which torch ends its groups with
            kwargs["distributed_init_method"] = f"file:///proc/self/fd/{descriptor}"
        super().__init__(**kwargs)

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        runner = self.model_runner
        moved = [f"model_runner.{name}" for name in RUNNER if not hasattr(runner, name)]
        moved += [f"model_runner.input_batch.{name}" for name in BATCH if not hasattr(runner.input_batch, name)]
        if moved:
            raise UnsupportedVLLMVersion(moved)

    def sample_tokens(self, grammar_output: Any) -> Any:
        batch = self.model_runner.input_batch
        aside: dict[int, Any] = {}
        if batch.generators and current_platform.is_cpu():
            unfinished = self.model_runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
            aside = {row: batch.generators.pop(row) for row in unfinished if row in batch.generators}
        output = super().sample_tokens(grammar_output)
        batch.generators.update(aside)
        return output


class HiddenStateWorker(StageWorker):
    """The same, which keeps hidden states. ``additional_config`` row_layers: which, as transformers counts them."""

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        self._rows: list[HiddenStates] = []
        language = self.model_runner.get_model().get_language_model().model
        language._set_aux_hidden_state_layers(tuple(self.vllm_config.additional_config["row_layers"]))
        self._embed = language.embed_tokens
        self.model_runner.use_aux_hidden_state_outputs = True

    def execute_model(self, scheduler_output: Any) -> Any:
        output = super().execute_model(scheduler_output)
        state = self.model_runner.execute_model_state
        if output is None and state is not None and state.aux_hidden_states is not None:
            self._keep(scheduler_output.num_scheduled_tokens, state)
        return output

    def _keep(self, counts: Any, state: Any) -> None:
        batch, begin = self.model_runner.input_batch, 0
        layers = torch.stack(state.aux_hidden_states, 1)
        for name in batch.req_ids:  # in this order the forward has them, one after the other
            end = begin + counts[name]
            position = int(batch.num_computed_tokens_cpu[batch.req_id_to_index[name]])
            self._rows.append(
                HiddenStates(name, position, layers[begin:end].clone(), state.hidden_states[begin:end].clone())
            )
            begin = end

    def take_hidden_states(self) -> list[HiddenStates]:
        """All since the last call."""
        rows, self._rows = self._rows, []
        return rows

    @torch.inference_mode()
    def embed(self, ids: Sequence[int]) -> Tensor:
        """Rows of the embedding table, (n, hidden)."""
        found: Tensor = self._embed(torch.as_tensor(ids, device=self.device))
        return found
