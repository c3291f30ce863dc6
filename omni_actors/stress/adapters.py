"""LoRA adapters of a run: one name, between whose versions the run switches.

The echo engine adds to each text a hash of the adapter's files that it has read. So the oracle of a request is that of
the version which the name had when the request was submitted, whatever dies or is switched before the request ends.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from omni_actors.errors import OmniError
from omni_actors.stress.workload import ADAPTER, Template, Workload
from omni_actors.system import OmniSystem

VERSIONS = 2
NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
"""A safetensors file."""
SWITCH_S = 1.0
"""How long a switch waits for each worker."""


def save_versions(directory: Path) -> Sequence[Path]:
    """Save files that the echo engine takes for adapters, and for weights; return a directory for each version."""
    saved = [directory / f"version-{number}" for number in range(VERSIONS)]
    for number, each in enumerate(saved):
        each.mkdir()
        config = {"peft_type": "LORA", "r": 1 + number, "lora_alpha": 1}
        (each / "adapter_config.json").write_text(json.dumps(config))
        (each / "adapter_model.safetensors").write_bytes(NO_TENSORS)
    return saved


def uses_adapter(workload: Workload) -> bool:
    """Return whether some request of the workload has an adapter."""
    return any("lora" in each.params for each in workload.templates.values())


async def switch(omni: OmniSystem, version: Path) -> None:
    """Give the name to a version. If no worker of a stage can load it now, the name keeps its version."""
    with suppress(OmniError):
        await omni.add_lora(ADAPTER, version, timeout_s=SWITCH_S)


def oracle_name(omni: OmniSystem, template: Template) -> str:
    """Return the name of the oracle of a request that is submitted now."""
    if "lora" not in template.params:
        return template.name
    [info] = omni.list_loras()
    return f"{template.name}, {info.digest}"
