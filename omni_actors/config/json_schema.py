"""The JSON schema of a pipeline file, for editors.

msgspec derives the types from the structs that check the file. The descriptions are the docstrings of the structs and
of their fields. An editor cannot check what types do not express, the graph of the stages for example: loading the
file does.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any, TypeAlias

import msgspec

from omni_actors.config.schema import Sections
from omni_actors.stages.registry import ENGINES

DIALECT = "https://json-schema.org/draft/2020-12/schema"
EXTENDS = "The pipeline, the model or the file that this file changes. A path is relative to this file."
SHORTHAND = "The {0} of all stages that have one."
IMPORT_PATH = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"

JSONObject: TypeAlias = dict[str, Any]


def json_schema() -> JSONObject:
    """Return the schema of a pipeline file: JSON Schema, draft 2020-12.

    A file that extends another one may leave out ``name``, ``stages`` and the engines of its stages, and may remove a
    stage with null.
    """
    found: list[type[msgspec.Struct] | None] = [Sections]
    for spec in ENGINES.values():
        found += [spec.options, spec.params]
    structs = [struct for struct in dict.fromkeys(found) if struct is not None]
    references, definitions = msgspec.json.schema_components(structs, ref_template="#/$defs/{name}")
    names = {struct: reference["$ref"] for struct, reference in zip(structs, references, strict=True)}
    for struct in _reached(structs):
        definition = definitions.get(struct.__name__) or definitions[f"{struct.__module__}.{struct.__qualname__}"]
        _describe(definition, struct)
    _specialize_stage(definitions["Stage"], names)
    return _document(definitions.pop("Sections"), definitions)


def _document(sections: JSONObject, definitions: JSONObject) -> JSONObject:
    properties = sections["properties"]
    properties["extends"] = {"type": "string", "description": EXTENDS}
    for name in ("model", "tokenizer"):
        properties[name] = {"type": "string", "description": SHORTHAND.format(name)}
    definitions["Stage"].pop("required")
    definitions["Stage"]["type"] = ["object", "null"]
    complete = {"required": sections.pop("required"), "properties": {"stages": {"additionalProperties": _COMPLETE}}}
    return {
        "$schema": DIALECT,
        **sections,
        "title": "A pipeline of omni_actors",
        "if": {"required": ["extends"]},
        "else": complete,
        "$defs": definitions,
    }


_COMPLETE = {"type": "object", "required": ["engine"]}
"""A stage of a file that extends no other one."""


def _specialize_stage(stage: JSONObject, names: dict[type[msgspec.Struct], str]) -> None:
    """Let the schema of ``options`` and ``defaults`` depend on the stage's engine."""
    engine = stage["properties"]["engine"]
    engine.pop("type")
    engine["anyOf"] = [{"enum": sorted(ENGINES)}, {"type": "string", "pattern": IMPORT_PATH}]
    stage["allOf"] = []
    for name, spec in sorted(ENGINES.items()):
        known = {"options": spec.options, "defaults": spec.params}
        properties = {key: {"$ref": names[struct]} for key, struct in known.items() if struct is not None}
        condition = {"properties": {"engine": {"const": name}}, "required": ["engine"]}
        stage["allOf"].append({"if": condition, "then": {"properties": properties}})


def _reached(structs: list[type[msgspec.Struct]]) -> set[type[msgspec.Struct]]:
    """Return ``structs`` and those that their fields name."""
    found: set[type[msgspec.Struct]] = set()
    pending: list[Any] = list(msgspec.inspect.multi_type_info(structs))
    while pending:
        match pending.pop():
            case msgspec.inspect.StructType(cls=struct, fields=fields) if struct not in found:
                found.add(struct)
                pending += [field.type for field in fields]
            case msgspec.inspect.UnionType(types=types):
                pending += types
            case msgspec.inspect.DictType(value_type=inner) | msgspec.inspect.VarTupleType(item_type=inner):
                pending.append(inner)
            case msgspec.inspect.ListType(item_type=inner):
                pending.append(inner)
    return found


def _describe(definition: JSONObject, struct: type[msgspec.Struct]) -> None:
    documented = field_docstrings(struct)
    for field in msgspec.structs.fields(struct):
        if field.name in documented:
            definition["properties"][field.encode_name]["description"] = documented[field.name]


def field_docstrings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the docstring of each field of ``struct`` that has one: the string that follows it in the source."""
    found: dict[str, str] = {}
    for each in reversed(struct.__mro__):
        if not issubclass(each, msgspec.Struct) or each is msgspec.Struct:
            continue
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring))):
                    found[name] = " ".join(inspect.cleandoc(docstring).split())
    return found
