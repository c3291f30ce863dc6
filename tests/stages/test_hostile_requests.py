"""Generated hostile requests beside a normal request, for every engine.

For any chunks and parameters, within the schema or not: the engine raises nothing but ``InvalidRequest``, the hostile
request ends once and leaves nothing behind, and the normal request in the same batch gets the same outputs as alone.

``OMNI_ACTORS_FUZZ=50`` in the environment runs 50 times as many examples.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from omni_actors.stages.base import InvalidRequest, StageFailure
from omni_actors.stages.registry import ENGINES
from tests.support.conformance import reachable
from tests.support.engine_cases import Case

FUZZ = int(os.environ.get("OMNI_ACTORS_FUZZ", "1"))
EXAMPLES = {"whisper": 4, "qwen2_5_token2wav": 5, "hibari_acoustic": 12, "hibari_vocoder": 25, "echo": 40}
"""Examples by engine; 15 for the others."""
STEPS = 25
"""After so many steps the hostile request is aborted, because some parameters ask for a long answer."""
NORMAL, HOSTILE = 2, 3

NUMBERS = st.sampled_from(
    [0, 1, -1, 2**31, 2**63 - 1, 0.5, 1e-45, 5e-324, -0.0, 1e38, 1e308, math.nan, math.inf, -math.inf]
)
TEXTS = st.sampled_from(
    [
        *("", " ", "\x00", "...", "\N{GRINNING FACE}", "漢字", "مرحبا", "\ud800", "\ufffe", "{{ 7 * 7 }}", "{% for %}"),
        *("<|im_start|>system\n", "<|im_end|>", "<|image_pad|>", "<|audio_start|>", "</s>", "[x](/ˈ/)", "İ 1. ⒈x "),
        *(str(10**36), "$" + "9" * 40, "1" * 5000, "⑴ and ⑼.", "a" * 100_000, "%" * 400, "\n" * 500, ") " * 500),
    ]
)
THINGS = st.one_of(NUMBERS, TEXTS, st.sampled_from([None, True, [], {}, [[]], {"a": [1]}, [None], b"\xff\x00"]))
MEDIA: dict[str, np.ndarray[Any, Any]] = {
    "audio": np.zeros(1600, np.float32),
    "image": np.zeros((4, 4, 3), np.uint8),
    "video": np.zeros((2, 4, 4, 3), np.uint8),
    "encoded_image": np.frombuffer(b"\x89PNG\r\n\x1a\n" + b"\xff" * 40, np.uint8),
    "encoded_video": np.frombuffer(b"\x00\x00\x00\x18ftypmp42" + b"\xff" * 40, np.uint8),
    "rows": np.zeros((2, 64), np.float32),
    "token_ids": np.arange(5),
    "embeds": np.zeros((3, 32), np.float32),
}
KEYS = ("text", "messages", "prompt", "index", "sample_rate", "fps", "sentence", "start", "echo")
MADE_ONCE = ("LLTokenizer", "StructureTokenizer")
"""Types of objects that an engine makes for the first request that needs them, and keeps."""
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image", "audio", "video", ""])},
    optional={"text": TEXTS, "index": st.integers(-1, 2) | THINGS},
)
MESSAGES = st.builds(
    lambda role, content: [{"role": role, "content": content}],
    st.sampled_from(["user", "system", "assistant", "developer", "", None]),
    st.one_of(TEXTS, THINGS, st.lists(PARTS, max_size=3)),
)


# values that a schema accepts


def accepted(node: inspect.Type) -> st.SearchStrategy[Any]:
    """Values of a type, often its bounds. Raises for a number without bounds or a list without a largest length."""
    match node:
        case inspect.UnionType(types=types):
            return st.one_of(*map(accepted, types))
        case inspect.Metadata(type=inner):
            return accepted(inner)
        case inspect.IntType(ge=int(low), le=int(high)):
            return st.sampled_from([low, high]) | st.integers(low, high)
        case inspect.FloatType(ge=low, gt=above, le=int() | float() as high) if {low, above} != {None}:
            least = float(low if low is not None else math.nextafter(above, math.inf))
            few = [number for number in (least, float(high), 1e-45, 1e-38, 0.1, 1.0) if least <= number <= high]
            return st.sampled_from(few) | st.floats(least, float(high))
        case inspect.StrType(pattern=str(pattern), max_length=int()):
            return st.from_regex(pattern.removesuffix("$") + r"\Z")
        case inspect.StrType(min_length=least, max_length=int(most)):
            return st.text(min_size=least or 0, max_size=min(most, 8)) | st.just("x" * most)
        case (
            inspect.VarTupleType(item_type=item, max_length=int(most))
            | inspect.ListType(item_type=item, max_length=int(most))
        ):
            return st.lists(accepted(item), max_size=min(most, 4))
        case inspect.DictType(key_type=key, value_type=value, max_length=int(most)):
            return st.dictionaries(accepted(key), accepted(value), max_size=min(most, 4))
        case inspect.StructType(fields=fields, forbid_unknown_fields=True):
            needed = {field.name: accepted(field.type) for field in fields if field.required}
            return st.fixed_dictionaries(
                needed, optional={field.name: accepted(field.type) for field in fields if not field.required}
            )
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.AnyType():  # only in a mapping, which has a size
            return st.none() | st.booleans()
    raise AssertionError(f"a parameter without bounds: {node}")


def parameters(engine: str) -> dict[str, st.SearchStrategy[Any]]:
    schema = ENGINES[engine].params
    assert schema is not None
    return {field.name: accepted(inspect.type_info(field.type)) for field in msgspec.structs.fields(schema)}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_parameter_has_finite_bounds(engine: str) -> None:
    for strategy in parameters(engine).values():
        strategy.validate()


# hostile chunks and parameters


def _alter(draw: Callable[..., Any], array: np.ndarray[Any, Any]) -> Any:
    """An array of another shape, dtype or content."""
    with np.errstate(all="ignore"):
        match draw(st.integers(0, 6)):
            case 0:
                dtype = draw(st.sampled_from(["bool", "int8", "uint64", "float16", "float64", "complex64"]))
                return array.astype(dtype)
            case 1:
                return np.atleast_1d(array)[:0]
            case 2:
                return array.reshape(-1)
            case 3:
                return array[None]
            case 4:
                return np.concatenate([array, array]) if array.ndim else array
            case 5:
                return array.reshape(-1)[0] if array.size else array
        altered = array.copy()
        if altered.size:
            number = np.asarray(draw(NUMBERS)).astype(altered.dtype)  # integers wrap around
            altered.reshape(-1)[draw(st.integers(0, altered.size - 1))] = number
        return altered


@st.composite
def hostile_chunks(draw: Callable[..., Any], case: Case) -> list[Any]:
    """The chunks of the case's first input, with up to two changes: altered, repeated or added values."""
    chunks = [(dict(data), dict(tensors)) for data, tensors in case.inputs[0]]
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(chunks) - 1))
        data, tensors = chunks[at]
        names = sorted(tensors)
        match draw(st.integers(0, 6)):
            case 0:
                data[draw(st.sampled_from(sorted({*data, *KEYS})))] = draw(THINGS)
            case 1:
                data["messages"] = draw(MESSAGES)
            case 2:
                data["text"] = draw(TEXTS)
            case 3:
                chunks.insert(at, chunks[draw(st.integers(0, len(chunks) - 1))])
            case 4:
                kind = draw(st.sampled_from(sorted(MEDIA)))
                data |= {"index": 0, "sample_rate": 8000, "fps": 2.0}
                tensors[kind] = _alter(draw, MEDIA[kind])
            case 5 if names:
                del tensors[draw(st.sampled_from(names))]
            case _ if names:
                name = draw(st.sampled_from(names))
                tensors[name] = _alter(draw, np.asarray(tensors[name]))
    return chunks


@st.composite
def hostile_parameters(draw: Callable[..., Any], case: Case) -> dict[str, Any]:
    """The case's parameters, some replaced by values that the schema accepts, or rarely by one that it refuses."""
    known = parameters(case.name)
    names = draw(st.lists(st.sampled_from(sorted(known)), max_size=4)) if known else []
    params = {**case.params, **{name: draw(known[name]) for name in names}}
    if names and draw(st.integers(0, 9)) == 0:
        params[names[0]] = draw(THINGS)
    return params


# beside a normal request


@pytest.mark.usefixtures("lenient_choices")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # large numbers overflow
@pytest.mark.parametrize("share", [pytest.param(4, id="few"), pytest.param(1, id="many", marks=pytest.mark.slow)])
def test_a_hostile_request_ends_once_and_changes_no_other(
    case: Case, driver: Any, capfd: pytest.CaptureFixture[str], share: int
) -> None:
    """share: one in so many of the examples is run."""
    case.check(driver, _beside(case, driver, {**case.params}, case.inputs[0]), 1)
    before = reachable(driver.engine)

    @settings(
        max_examples=math.ceil(EXAMPLES.get(case.name, 15) * FUZZ / share),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )
    @given(params=hostile_parameters(case), chunks=hostile_chunks(case))
    def changes_no_other(params: dict[str, Any], chunks: list[Any]) -> None:
        case.check(driver, _beside(case, driver, params, chunks), 1)

    try:
        changes_no_other()
    finally:
        for request_id in list(driver.live):  # left by an example that failed
            driver.abort(request_id)
        capfd.readouterr()  # the tracebacks of refused requests
    after = reachable(driver.engine)
    assert {**after, **dict.fromkeys(MADE_ONCE, 1)} == {**before, **dict.fromkeys(MADE_ONCE, 1)}


def _beside(case: Case, driver: Any, params: dict[str, Any], chunks: list[Any]) -> list[Any]:
    """Run a hostile request beside the normal one, alternating chunks. Return the outputs of the normal one."""
    case.start(driver, NORMAL)
    ended = 0
    try:
        driver.start(HOSTILE, (case.source,), **params)
    except InvalidRequest:
        ended += 1
    normal: list[Any] = []
    for at in range(max(len(chunks), len(case.inputs[1]))):
        if at < len(chunks) and not ended:
            try:
                driver.feed(HOSTILE, *chunks[at], last=at == len(chunks) - 1, source=case.source)
            except InvalidRequest:
                driver.live.discard(HOSTILE)
                ended += 1
        case.feed(driver, NORMAL, 1, slice(at, at + 1))
        if driver.engine.busy:
            ended += _take(driver.step(), normal)
    steps = 0
    while driver.engine.busy:
        steps += 1
        if steps > STEPS and HOSTILE in driver.live:
            driver.abort(HOSTILE)
            ended += 1
            continue
        ended += _take(driver.step(), normal)
    assert ended == 1
    assert not driver.live
    return normal


def _take(outputs: list[Any], normal: list[Any]) -> int:
    """Collect the normal request's outputs of one step. Return how often the hostile request ended in it."""
    normal += [output for output in outputs if output.request_id == NORMAL]
    return sum(isinstance(output, StageFailure) or output.last for output in outputs if output.request_id == HOSTILE)
