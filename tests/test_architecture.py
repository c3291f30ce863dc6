"""The architecture, as a test: which layer may import which, and what an import may load.

Rules
1. The tests read the sources' syntax trees, so they find every import statement, inside functions too.
2. Every module belongs to the layer in ``LAYERS`` with the longest matching name; one that belongs to none fails.
3. Of this project's modules, a layer may import itself and those in its row. A row names only rows above it.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
LEAVES = {
    *("omni_actors.errors", "omni_actors.protocol.messages", "omni_actors.metrics", "omni_actors.config"),
    *("omni_actors.validation", "omni_actors.log_events", "omni_actors.playback", "ringbuf.syscalls"),
    "omni_actors.installed",
}
WORKER = {
    *("omni_actors.errors", "omni_actors.metrics", "omni_actors.protocol.messages"),
    *("omni_actors.protocol", "omni_actors.platform", "omni_actors.stages.base"),
    *("ringbuf", "ringbuf.syscalls"),
}
"""What a worker and its supervisor may import."""
ENGINE_DATA = {f"omni_actors.stages.{name}" for name in ("base", "bounds", "registry", "assets", "memory")}
"""What can be imported without an engine's libraries."""
OPTIONS = "omni_actors.stages.*.options"
"""The row of every engine's options and request parameters."""
PIPELINE_INDEX = "omni_actors.stages.diffusion.pipeline_index"

LAYERS: dict[str, set[str]] = {
    "ringbuf.syscalls": set(),
    "ringbuf": {"ringbuf.syscalls"},
    "omni_actors.deaths": set(),
    "omni_actors.errors": {"omni_actors.deaths"},
    "omni_actors.transitions": set(),
    "omni_actors.stage_graph": set(),
    "omni_actors.log_events": {"omni_actors.errors"},
    "omni_actors.validation": {"omni_actors.errors"},
    "omni_actors.playback": set(),
    "omni_actors.plain_text": set(),
    "omni_actors.installed": set(),
    "omni_actors.network_addresses": set(),
    "omni_actors.metrics": {"omni_actors.errors", "omni_actors.playback"},
    "omni_actors.protocol.messages": {"omni_actors.errors"},
    "omni_actors.stages.base": {"omni_actors.errors", "omni_actors.protocol.messages", "ringbuf"},
    "omni_actors.stages.assets": {"omni_actors.errors"},
    "omni_actors.stages.bounds": set(),
    OPTIONS: {"omni_actors.stages.bounds"},
    "omni_actors.stages.adapters.files": {"omni_actors.errors", OPTIONS},
    PIPELINE_INDEX: set(),
    "omni_actors.stages.registry": {"omni_actors.stages.base", OPTIONS, PIPELINE_INDEX},
    "omni_actors.stages.memory": {"omni_actors.stages.registry"},
    "omni_actors.stages": {
        *("omni_actors.errors", "omni_actors.validation", "ringbuf", "ringbuf.syscalls", OPTIONS),
        *(f"omni_actors.stages.{name}" for name in ("base", "assets", "bounds", "adapters.files")),
        PIPELINE_INDEX,
    },
    "omni_actors.config": {
        *("omni_actors.errors", "omni_actors.validation", "omni_actors.protocol.messages"),
        *("omni_actors.stages.registry", "omni_actors.stages.assets", PIPELINE_INDEX),
    },
    "omni_actors.protocol": {
        "omni_actors.errors",
        "omni_actors.protocol.messages",
        "omni_actors.stages.base",
        "ringbuf",
    },
    "omni_actors.platform": {"omni_actors.errors", "ringbuf"},
    "omni_actors.worker": WORKER,
    "omni_actors.supervisor": {
        *WORKER,
        *("omni_actors.worker", "omni_actors.config", "omni_actors.transitions", "omni_actors.log_events"),
        *("omni_actors.stage_graph", "omni_actors.validation"),
    },
    "omni_actors.cluster": {
        *("omni_actors.errors", "omni_actors.config", "omni_actors.protocol", "omni_actors.protocol.messages"),
        *("omni_actors.platform", "omni_actors.supervisor", "omni_actors.log_events"),
        *("omni_actors.network_addresses", "omni_actors.installed", "ringbuf", "ringbuf.syscalls"),
    },
    "omni_actors.orchestrator": {
        *("omni_actors.supervisor", "omni_actors.protocol", "omni_actors.stages.base", "omni_actors.transitions"),
        "omni_actors.stage_graph",
        *LEAVES,
    },
    "omni_actors.outputs": {"omni_actors.errors", "ringbuf"},
    "omni_actors.output_files": {"omni_actors.outputs"},
    "omni_actors.generation": {
        *("omni_actors.orchestrator", "omni_actors.protocol", "omni_actors.outputs", "omni_actors.output_files"),
        *("ringbuf", *LEAVES),
    },
    "omni_actors.generations": {"omni_actors.generation", "omni_actors.outputs", *LEAVES},
    "omni_actors.media": {"omni_actors.outputs", "omni_actors.orchestrator", "ringbuf", *LEAVES},
    "omni_actors.prompts": {"omni_actors.media", "omni_actors.orchestrator", *LEAVES},
    "omni_actors.system": {
        "omni_actors.prompts",
        "omni_actors.media",
        "omni_actors.generation",
        "omni_actors.generations",
        "omni_actors.outputs",
        "omni_actors.orchestrator",
        "omni_actors.supervisor",
        "omni_actors.cluster",
        "omni_actors.protocol",
        "ringbuf",
        *LEAVES,
        *ENGINE_DATA,
        *("omni_actors.stages.adapters.files", OPTIONS),
    },
    "omni_actors.background": {"omni_actors.system", *LEAVES},
    "omni_actors.iterators": {"omni_actors.errors"},
    "omni_actors.face": {
        *("omni_actors.background", "omni_actors.generation", "omni_actors.generations", "omni_actors.system"),
        *("omni_actors.iterators", "omni_actors.outputs", *LEAVES),
    },
    **{
        f"omni_actors.{face}": {
            *("omni_actors.face", "omni_actors.generation", "omni_actors.generations", "omni_actors.prompts"),
            *("omni_actors.outputs", "omni_actors.system"),
        }
        for face in ("sync", "aio")
    },
    "omni_actors": {
        *("omni_actors.generation", "omni_actors.generations", "omni_actors.media", "omni_actors.prompts"),
        *("omni_actors.outputs", "omni_actors.system", *LEAVES),
    },
    "omni_actors.command_line": {"omni_actors.errors", "omni_actors.config", "omni_actors.plain_text"},
    "omni_actors.turns": {"omni_actors.stages.assets"},
    "omni_actors.serve.http": {"omni_actors.network_addresses"},
    "omni_actors.serve": {
        "omni_actors.turns",
        "omni_actors",
        "omni_actors.command_line",
        "omni_actors.network_addresses",
        "omni_actors.platform",
        "omni_actors.serve.http",
        "omni_actors.system",
        "omni_actors.generation",
        "omni_actors.generations",
        "omni_actors.outputs",
        *LEAVES,
        *ENGINE_DATA,
    },
    "omni_actors.stress": {
        "omni_actors",
        "omni_actors.command_line",
        "omni_actors.generation",
        "omni_actors.outputs",
        "omni_actors.system",
        "omni_actors.orchestrator",
        "omni_actors.supervisor",
        "omni_actors.cluster",
        "omni_actors.worker",
        "omni_actors.platform",
        "omni_actors.protocol",
        "ringbuf",
        *LEAVES,
        *ENGINE_DATA,
    },
    "omni_actors.cli": {
        "omni_actors",
        *("omni_actors.command_line", "omni_actors.plain_text"),
        *("omni_actors.generation", "omni_actors.outputs", "omni_actors.output_files"),
        "omni_actors.system",
        "omni_actors.cluster",
        "omni_actors.serve",
        "omni_actors.stress",
        *LEAVES,
        *ENGINE_DATA,
    },
    "omni_actors.__main__": {"omni_actors.cli"},
}

HEAVY = {"torch", "transformers", "onnxruntime", "faster_whisper", "ctranslate2", "vllm", "ray", "diffusers"}
FORBIDDEN_LIBRARIES: dict[str, set[str]] = {
    "ringbuf": HEAVY | {"trio"},
    "omni_actors": HEAVY,
    "omni_actors.cluster.ray_helper": HEAVY - {"ray"},  # a process of its own
    "omni_actors.cli": HEAVY - {"torch"},  # "config explain" counts the machine's devices
    "omni_actors.turns": (HEAVY - {"onnxruntime"}) | {"trio"},
    "omni_actors.errors": HEAVY | {"numpy", "trio"},
    "omni_actors.log_events": HEAVY | {"numpy", "trio"},
    "omni_actors.protocol.messages": HEAVY | {"numpy", "trio"},
    "omni_actors.metrics": HEAVY | {"numpy", "trio"},
    "omni_actors.config": HEAVY | {"numpy", "trio"},
    "omni_actors.orchestrator": HEAVY | {"numpy"},
    "omni_actors.stages": {"trio"},
    "omni_actors.stages.base": HEAVY | {"trio"},
    **{
        module: HEAVY | {"trio"}
        for module in (
            *(OPTIONS, PIPELINE_INDEX),
            *(f"omni_actors.stages.{name}" for name in ("bounds", "memory", "registry", "adapters.files")),
        )
    },
}
"""The libraries that no import statement of a layer may name. The longest matching name counts."""

STAGE_AND_MODEL_NAMES = {
    *("thinker", "talker", "code2wav", "token2wav", "vocoder", "ear"),
    *("llm", "whisper", "hibari", "smollm2", "qwen", "qwen2", "qwen3"),
}


class Import(NamedTuple):
    module: str
    """The absolute name: "omni_actors.stages.base", "numpy.typing"."""
    line: int


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for top in ("ringbuf", "omni_actors") for path in sorted((ROOT / top).rglob("*.py"))}


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"), str(SOURCES[module]))


@functools.cache
def nodes_of(module: str) -> list[ast.AST]:
    """The imports, classes and calls of a module. Several tests look at them, and walking a tree is slow."""
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.Call)
    return [node for node in ast.walk(tree_of(module)) if isinstance(node, kinds)]


@functools.cache
def imports_of(module: str) -> list[Import]:
    """Every module that ``module`` names in an import statement. ``from package import submodule`` is the submodule."""
    found = []
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            source = node.module or ""
            names = (f"{source}.{alias.name}" for alias in node.names)
            found += [Import(name, node.lineno) for name in {name if name in SOURCES else source for name in names}]
    return found


def owner(module: str, table: dict[str, set[str]]) -> str | None:
    """Return the row of ``table`` for a module: the longest name that it equals or lies below."""
    if fnmatch(module, OPTIONS):
        return OPTIONS
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in names if name in table), None)


def layer(module: str) -> str | None:
    """Return the layer of a module. The row "omni_actors" is for that module alone; others need rows of their own."""
    found = owner(module, LAYERS)
    return None if found == "omni_actors" and module != "omni_actors" else found


def test_the_table_has_no_cycle() -> None:
    rows = list(LAYERS)
    upward = {(row, below) for n, row in enumerate(rows) for below in LAYERS[row] if below not in rows[:n]}
    assert not upward


def test_every_row_has_a_module() -> None:
    assert LAYERS.keys() <= {layer(module) for module in SOURCES}


def test_a_module_imports_only_what_its_layer_may() -> None:
    wrong = []
    for module in SOURCES:
        mine = layer(module)
        assert mine is not None, f"{module} has no row in LAYERS: add it to a layer"
        for found in imports_of(module):
            is_ours = found.module.split(".")[0] in ("ringbuf", "omni_actors")
            if is_ours and layer(found.module) not in {mine, *LAYERS[mine]}:
                wrong.append(f"{module}:{found.line} (layer {mine}): {found.module}")
    assert not wrong, "a layer may import itself and what its row in LAYERS names"


def test_no_module_imports_a_forbidden_library() -> None:
    wrong = []
    for module in SOURCES:
        mine = owner(module, FORBIDDEN_LIBRARIES)
        assert mine is not None, f"{module} has no row in FORBIDDEN_LIBRARIES"
        wrong += [
            f"{module}:{found.line}: {found.module}"
            for found in imports_of(module)
            if found.module.split(".")[0] in FORBIDDEN_LIBRARIES[mine]
        ]
    assert not wrong


def private_owner(name: str) -> str | None:
    """Return the package that the first private part of a dotted name belongs to; None if no part is private."""
    parts = name.split(".")
    private = next((n for n, part in enumerate(parts) if part.startswith("_") and not part.endswith("__")), None)
    if private is None:
        return None
    parent = ".".join(parts[:private])
    is_module = parent in SOURCES and SOURCES[parent].name != "__init__.py"
    return parent.rpartition(".")[0] if is_module else parent


PRIVATE_IMPORTS = {
    # The simulation sets the order in which trio runs tasks, for which trio has no public interface.
    *(("omni_actors.stress.simulation.simulation", "trio"), ("omni_actors.stress.simulation.determinism", "trio")),
    # What is free on each node: Ray calls the function an interface for developers, and its version is pinned.
    ("omni_actors.cluster.ray_helper", "ray"),
    # NIXL's public agent fixes an option with which its thread takes a whole core. Its version is pinned.
    ("omni_actors.cluster.nixl_process", "nixl_cu12"),
}


def test_no_module_imports_what_is_private_to_another_package() -> None:
    wrong = []
    for module in SOURCES:
        for node in nodes_of(module):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            source = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                owner = private_owner(source + alias.name)
                inside = owner is None or f"{module}.".startswith(f"{owner}.")
                if not inside and (module, owner) not in PRIVATE_IMPORTS:
                    wrong.append(f"{module}:{node.lineno}: {source}{alias.name}")
    assert not wrong


def test_every_module_opens_with_its_rules() -> None:
    assert not [module for module in SOURCES if not ast.get_docstring(tree_of(module))], "these have no docstring"


def words(text: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", text.lower()))


def docstrings(tree: ast.Module) -> set[ast.expr]:
    """Return the strings that are statements: they document."""
    return {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def test_the_orchestrator_names_no_stage_and_no_model() -> None:
    modules = [name for name in SOURCES if layer(name) == "omni_actors.orchestrator"]
    assert not [found for module in modules for found in stages_and_models_named_in(module)]


def stages_and_models_named_in(module: str) -> list[str]:
    tree = tree_of(module)
    documentation = docstrings(tree)
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if node not in documentation:
                pass
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text):
                pass
            case ast.FunctionDef(name=text) | ast.AsyncFunctionDef(name=text) | ast.ClassDef(name=text):
                pass
            case _:
                continue
        if words(text) & STAGE_AND_MODEL_NAMES:
            found.append(f"{module}:{node.lineno}: {text!r}")
    return found


POSITIONAL_FIELDS = 4


def test_an_object_of_many_fields_is_constructed_by_keyword() -> None:
    """Two fields of one type that change places go unnoticed by the type checker."""
    classes = {node.name for module in SOURCES for node in nodes_of(module) if isinstance(node, ast.ClassDef)}
    wrong = []
    for module in SOURCES:
        for node in nodes_of(module):
            match node:
                case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args):
                    if name in classes and len(args) > POSITIONAL_FIELDS:
                        wrong.append(f"{module}:{node.lineno}: {name} with {len(args)} positional arguments")
    assert not wrong


MUST_NOT_LOAD = {
    "ringbuf": {*HEAVY, "trio", "omni_actors"},
    "omni_actors": HEAVY,
    "omni_actors.system": {*HEAVY, "omni_actors.cluster"},
    "omni_actors.worker.main": {*HEAVY, "trio", "omni_actors.cluster"},
    "omni_actors.cli": {*HEAVY, "trio", "omni_actors.system"},
    "omni_actors.cli.ask": HEAVY,
    "omni_actors.serve.command": {*HEAVY, "omni_actors.cluster"},
    "omni_actors.turns": {*HEAVY, "trio"},
}


@pytest.mark.parametrize("module", MUST_NOT_LOAD)
def test_importing_loads_no_more_than_it_should(module: str) -> None:
    """The import runs in a new interpreter, so that indirect imports count too."""
    program = f"import json, sys, {module}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not set(json.loads(done.stdout)) & MUST_NOT_LOAD[module]
