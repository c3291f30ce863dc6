"""Pure functions on the graph of a pipeline's stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def downstream_stages(stages: Iterable[str], inputs: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
    """Return all stages that use the output of one of ``stages``, directly or through others, in topological order.

    inputs: the upstream stages of each stage, in topological order.

    >>> downstream_stages(["llm"], {"ear": [], "llm": ["ear"], "talker": ["llm"], "vocoder": ["talker"]})
    ('talker', 'vocoder')
    """
    feeding, found = set(stages), []
    for stage, sources in inputs.items():
        if not feeding.isdisjoint(sources):
            feeding.add(stage)
            found.append(stage)
    return tuple(found)
