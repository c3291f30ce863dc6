"""The cases of the engines of omni models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.engine_cases.case import Case, FeedArgs, shown


def qwen3_code2wav(_: pytest.FixtureRequest) -> Case:
    def chunks(seed: int) -> list[FeedArgs]:
        frames = np.random.default_rng(seed).integers(0, 64, (9, 4), dtype=np.int16)
        return [({}, {"codes": frames[at : at + 3]}) for at in (0, 3, 6)]

    def normalise(outputs: list[Any]) -> Any:
        audio = np.concatenate([output.tensors["audio"] for output in outputs if output.tensors])
        assert audio.shape == (9 * 1920 - 555,)
        return audio

    return Case(
        name="qwen3_code2wav",
        inputs=[chunks(1), chunks(2)],
        refused=({}, {"codes": np.zeros((1, 3), np.int16)}),
        normalise=normalise,
        source="talker",
    )


def qwen3_thinker(_: pytest.FixtureRequest) -> Case:
    def normalise(outputs: list[Any]) -> Any:
        rows = np.concatenate([o.downstream["rows"].numpy() for o in outputs if "rows" in o.downstream])
        end = outputs[-1].data
        assert len(rows) == len(outputs[0].downstream["ids"].numpy()) + end["completion_tokens"] - 1
        return "".join(output.data.get("text", "") for output in outputs), end["finish_reason"], rows

    return Case("qwen3_thinker", [shown(1), shown(2)], ({"messages": "none"}, {}), normalise, max_tokens=6)


def qwen3_talker(_: pytest.FixtureRequest) -> Case:
    def chunks(seed: int) -> list[FeedArgs]:
        prompt, answer = np.random.default_rng(seed).normal(0, 1, (2, 9, 64)).astype(np.float32)
        once = {"ids": np.arange(9), "is_media": np.arange(9) == 2, "tts": prompt[:3]}
        return [({}, {**once, "rows": prompt[:5]}), ({}, {"rows": prompt[5:]}), ({}, {"rows": answer})]

    def normalise(outputs: list[Any]) -> Any:
        codes = np.concatenate([np.zeros((0, 4), np.int16), *(o.tensors["codes"] for o in outputs if o.tensors)])
        assert len(codes) <= 7
        return codes

    params = {"talker_max_tokens": 8, "seed": 0}
    refused = ({}, {"rows": np.zeros((1, 63), np.float32)})
    return Case(
        name="qwen3_talker",
        inputs=[chunks(1), chunks(2)],
        refused=refused,
        normalise=normalise,
        source="thinker",
        **params,
    )


def qwen2_5_thinker(_: pytest.FixtureRequest) -> Case:
    def normalise(outputs: list[Any]) -> Any:
        rows = np.concatenate([o.downstream["rows"].numpy() for o in outputs if "rows" in o.downstream])
        end = outputs[-1].data
        assert rows.shape == (end["prompt_tokens"] + end["completion_tokens"] - 1, 64)
        return "".join(output.data.get("text", "") for output in outputs), end["finish_reason"], rows

    return Case("qwen2_5_thinker", [shown(1), shown(2)], ({"messages": "none"}, {}), normalise, max_tokens=6)


def qwen2_5_talker(_: pytest.FixtureRequest) -> Case:
    def chunks(seed: int) -> list[FeedArgs]:
        rng = np.random.default_rng(seed)
        prompt, answer = rng.normal(0, 1, (2, 9, 64)).astype(np.float32)
        places = np.arange(9)
        once = {"ids": places, "positions": places[None].repeat(3, 0), "tts": prompt[:4]}
        return [({}, {**once, "rows": prompt[:5]}), ({}, {"rows": prompt[5:]}), ({}, {"rows": answer})]

    def normalise(outputs: list[Any]) -> Any:
        codes = np.concatenate([output.tensors["codes"] for output in outputs if output.tensors])
        assert 0 < len(codes) <= 12
        return codes

    params = {"talker_max_tokens": 12, "seed": 0}
    refused = ({}, {"rows": np.zeros((1, 63), np.float32)})
    return Case(
        name="qwen2_5_talker",
        inputs=[chunks(1), chunks(2)],
        refused=refused,
        normalise=normalise,
        source="thinker",
        **params,
    )


def qwen2_5_token2wav(_: pytest.FixtureRequest) -> Case:
    def chunks(seed: int) -> list[FeedArgs]:
        codes = np.random.default_rng(seed).integers(0, 64, (26, 1), dtype=np.int16)
        return [({}, {"codes": codes[at : at + 13]}) for at in (0, 13)]

    def normalise(outputs: list[Any]) -> Any:
        audio = np.concatenate([output.tensors["audio"] for output in outputs])
        assert audio.shape == (26 * 480,)
        return audio

    refused = ({}, {"codes": np.zeros((1, 2), np.int16)})
    return Case(
        name="qwen2_5_token2wav",
        inputs=[chunks(1), chunks(2)],
        refused=refused,
        normalise=normalise,
        source="talker",
        seed=0,
    )
