"""The pipelines of one server.

Rules
1. A request belongs to the pipeline that its model names: the pipeline itself, or one of its LoRA adapters. The
   name of a pipeline comes before that of an adapter.
2. Each pipeline has a system, places and metrics of its own. What happens in one changes nothing in another.
3. A pipeline refuses requests until all of its stages have been ready once.
4. Metrics of several pipelines have the label ``pipeline``. Those of a single one have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from omni_actors.serve.api.schemas import require_model
from omni_actors.serve.http.errors import HTTPError, bad_request
from omni_actors.system import OmniSystem

LOADING_RETRY_S = 1


class Pipelines:
    """The systems that a server has, by the names of their pipelines, which differ.

    loaded: the names of the pipelines whose stages have all been ready once.
    """

    def __init__(self, systems: Sequence[OmniSystem]) -> None:
        self.by_name = {system.pipeline.name: system for system in systems}
        self.first = systems[0]
        self.loaded: set[str] = set()
        self.registry = self.first.metrics.registry if len(systems) == 1 else CollectorRegistry()
        """Has the metrics of the server itself."""

    @property
    def systems(self) -> Sequence[OmniSystem]:
        return list(self.by_name.values())

    @property
    def are_several(self) -> bool:
        return len(self.by_name) > 1

    def require_any_loaded(self) -> None:
        """Raises HTTPError 503 if no pipeline has loaded."""
        if not self.loaded:
            message = "the models are loading; see /health" if self.are_several else "the model is loading; see /health"
            raise HTTPError(503, message, code="loading", retry_after_s=LOADING_RETRY_S)

    def choose(self, model: str | None) -> OmniSystem:
        """Return the system of a request. model: None stands for the only pipeline. Raises HTTPError 400, 404, 503."""
        if model is None and self.are_several:
            message = f"model: a model is missing; this server serves {', '.join(map(repr, self.by_name))}"
            raise bad_request(message, "model", "missing_required_parameter")
        system = self.first if model is None else self._of_model(model)
        if system.pipeline.name not in self.loaded:
            message = f"the model {system.pipeline.name!r} is loading; see /health"
            raise HTTPError(503, message, code="loading", retry_after_s=LOADING_RETRY_S)
        return system

    def _of_model(self, model: str) -> OmniSystem:
        """Return the system that serves a model. Raises HTTPError 404 if none does."""
        if (system := self.by_name.get(model)) is not None:
            return system
        for system in self.systems:
            if any(info.name == model for info in system.list_loras()):
                return system
        adapters = [info.name for system in self.systems for info in system.list_loras()]
        require_model(model, [*self.by_name, *adapters])
        raise AssertionError("the model is none of these")

    def named(self, name: object) -> OmniSystem:
        """Return the system of a pipeline. None: that of the only one. Raises HTTPError 400 or 404."""
        if name is None and not self.are_several:
            return self.first
        known = ", ".join(map(repr, self.by_name))
        if not isinstance(name, str):
            message = f"pipeline: the name of a pipeline is missing; this server has {known}"
            raise bad_request(message, "pipeline", "missing_required_parameter")
        if name not in self.by_name:
            message = f"pipeline: there is no {name!r}; this server has {known}"
            raise HTTPError(404, message, param="pipeline", code="pipeline_not_found")
        return self.by_name[name]

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus's text format (rule 4)."""
        if not self.are_several:
            return self.first.metrics.exposition()
        return generate_latest(_Merged(self.registry, {name: s.metrics.registry for name, s in self.by_name.items()}))


class _Merged(CollectorRegistry):
    """The metrics of the server, and those of each pipeline with its name as a label."""

    def __init__(self, server: CollectorRegistry, pipelines: Mapping[str, CollectorRegistry]) -> None:
        super().__init__()
        self._server, self._pipelines = server, pipelines

    def collect(self) -> Iterable[Metric]:
        """Return each family once, with the samples of all pipelines."""
        yield from self._server.collect()
        families: dict[str, Metric] = {}
        for name, registry in self._pipelines.items():
            for each in registry.collect():
                family = families.setdefault(each.name, Metric(each.name, each.documentation, each.type))
                family.samples += [
                    sample._replace(labels={"pipeline": name, **sample.labels}) for sample in each.samples
                ]
        yield from families.values()
