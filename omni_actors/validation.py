"""Checks of what a caller gave, and msgspec's validation errors in plain words.

They are for configuration files, for requests, and for the arguments of methods.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import inspect
from msgspec.inspect import FloatType, IntType, ListType, LiteralType, Metadata, NoneType, StructType, Type, UnionType

from omni_actors.errors import InvalidRequest

WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "object": "a mapping",
    "array": "a list",
}
"""The types of msgspec's messages."""
UNKNOWN = "unknown field"
"""How the message about a field begins that a schema does not have."""
_NAMES: dict[type[Type], str] = {
    IntType: "int",
    FloatType: "float",
    inspect.StrType: "str",
    inspect.BoolType: "bool",
    ListType: "array",
    StructType: "object",
    inspect.DictType: "object",
}
"""The names of types in msgspec's messages."""
_NOTHING = {"null", "[]", "0", "0.0"}
"""Values that mean "none". A field that has no others is not supported."""
_OTHER = "?"
"""What a type accepts that is not in words here. msgspec's message then says all that is known."""
_LONGEST_QUOTE = 150
"""Characters of a message that may quote a value. What is accepted follows."""


def require_seconds(param: str, given: Any, expected: str = "seconds from 0 on", *, endless: bool = False) -> None:
    """Raise InvalidRequest if an argument is not a number of seconds from 0 on, which a float can have.

    Args:
        param: the argument's name.
        given: its value.
        expected: what is accepted, in words.
        endless: whether infinity is accepted, too.
    """
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not (0 <= given <= sys.float_info.max or (endless and given == math.inf)):
        raise InvalidRequest(f"{param}: expected {expected}, found {given!r:.200}", param=param)


def is_printable(given: Any, longest: int) -> bool:
    """Return whether an argument is a text of 1 to ``longest`` printable characters."""
    return isinstance(given, str) and 0 < len(given) <= longest and given.isprintable()


def explained(error: Exception, schema: Any, given: Any) -> tuple[str, str]:
    """Return the message of a validation error with what is accepted, and the path of the wrong value.

    A description in the schema (``Meta.description``) is what is accepted, in words.

    Args:
        error: that of a conversion.
        schema: the type of the conversion.
        given: the value that it did not accept.

    >>> import msgspec, typing
    >>> fields = [("format", typing.Literal["jpeg", "png"]), ("mask", None, None)]
    >>> picture = msgspec.defstruct("Picture", fields, forbid_unknown_fields=True)
    >>> def refused(given):
    ...     try:
    ...         msgspec.convert(given, picture)
    ...     except msgspec.ValidationError as error:
    ...         return explained(error, picture, given)
    >>> refused({"format": "gif"})
    ("Invalid value 'gif'; accepted: 'jpeg', 'png'", 'format')
    >>> refused({"mask": "a cat"})
    ('not supported; accepted: null', 'mask')
    >>> refused({"size": 1})
    ("unknown field; accepted: 'format', 'mask'", 'size')
    """
    message, path = split_path(error)
    nodes = [_inspected(schema)]
    for key in re.findall(r"[^.\[\]]+(?:\[\])?", path):
        nodes = [below for node in _alternatives(nodes) for below in _below(node, key, given)]
        given = _value(given, key)
    if message.startswith("Object contains unknown field `"):
        name = message.partition("`")[2].removesuffix("`")[:_LONGEST_QUOTE]
        known = ", ".join(map(repr, _fields(nodes, given)))
        return f"{UNKNOWN}; accepted: {known}" if known else UNKNOWN, f"{path}.{name}" if path else name
    words = list(dict.fromkeys(word for node in nodes for word in _words(node)))
    if _OTHER in words:
        return message, path
    if words and _NOTHING.issuperset(words):
        return f"not supported; accepted: {', '.join(words)}", path
    if {*WORDS.values(), "null"}.issuperset(words) or message.startswith("Object missing"):
        return message, path  # it says itself what is accepted
    if message.startswith("expected text matching regex"):
        return f"expected {' or '.join(words)}", path
    return f"{message[:_LONGEST_QUOTE].replace('enum value', 'value', 1)}; accepted: {', '.join(words)}", path


@functools.cache
def _inspected(schema: Any) -> Type:
    return inspect.type_info(schema)  # it takes milliseconds


def _alternatives(nodes: Iterable[Type]) -> Iterator[Type]:
    for node in nodes:
        match node:
            case UnionType(types=types):
                yield from _alternatives(types)
            case Metadata(type=inner):
                yield from _alternatives([inner])
            case _:
                yield node


def _below(node: Type, key: str, given: Any) -> list[Type]:
    """Return the types that the value ``key`` of a value can have. given: the value, or anything."""
    match node:
        case ListType(item_type=item) if key.isdigit():
            return [item]
        case StructType(tag_field=tag_field, tag=tag) if key == tag_field:
            return [LiteralType((tag,))]
        case StructType(fields=fields) if _has_tag(given, node):
            return [each.type for each in fields if each.encode_name == key]
    return []


def _has_tag(given: Any, node: StructType) -> bool:
    """Return whether a value has the tag of a struct, as far as it has one."""
    return node.tag_field is None or not isinstance(given, Mapping) or given.get(node.tag_field, node.tag) == node.tag


def _value(given: Any, key: str) -> Any:
    try:
        return given[key] if isinstance(given, Mapping) else given[int(key)]
    except (LookupError, TypeError, ValueError):  # the name of an unknown field may look like a path
        return None


def _fields(nodes: Iterable[Type], given: Any) -> list[str]:
    """Return the names of the fields that a value can have."""
    structs = [node for node in _alternatives(nodes) if isinstance(node, StructType) and _has_tag(given, node)]
    names = {field.encode_name for node in structs for field in node.fields}
    return sorted(names | {node.tag_field for node in structs if node.tag_field is not None})


def _words(node: Type) -> list[str]:
    """Return what a type accepts, in words."""
    match node:
        case UnionType(types=types):
            return [word for each in types for word in _words(each)]
        case Metadata(extra_json_schema={"description": str(words)}):
            return [words]
        case Metadata(type=inner):
            return _words(inner)
        case LiteralType(values=values):
            return [repr(value) for value in values]
        case IntType(ge=least, le=most) | FloatType(ge=least, le=most) if least is not None and least == most:
            return [repr(least)]
        case ListType(max_length=0):
            return ["[]"]
        case NoneType():
            return ["null"]
    return [WORDS[name] if (name := _NAMES.get(type(node))) else _OTHER]


def split_path(error: Exception) -> tuple[str, str]:
    """Return the message of a validation error in plain words, and the path of the wrong value ("" for the whole).

    >>> split_path(ValueError("Expected `int`, got `str` - at `$.stages[0].size`"))
    ('expected an integer, got text', 'stages[0].size')
    >>> split_path(ValueError("Expected `str`, got `int` - at `key` in `$.env`"))
    ('expected text, got an integer, as a key', 'env')
    """
    text = str(error)
    message, _, end = text.rpartition(" - at `")  # the last one is msgspec's own: the value may contain the same words
    place = re.fullmatch(r"(key` in `)?\$([^`]*)`", end)
    if place is None:
        return plain(text), ""
    return plain(message) + (", as a key" if place[1] else ""), place[2].lstrip(".")


def plain(message: str) -> str:
    """Return a message of msgspec with its types in plain words.

    >>> plain("Expected `int` >= 1")
    'expected an integer >= 1'
    >>> plain("Expected `str | null`, got `int`")
    'expected text or null, got an integer'
    """
    if not message.startswith("Expected "):
        return message  # it may quote the value
    words = re.sub(r"`([^`]*)`", lambda names: " or ".join(WORDS.get(n, n) for n in names[1].split(" | ")), message)
    return f"e{words[1:]}"
