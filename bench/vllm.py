"""`.venv-vllm/bin/python -m bench.vllm`: compare a stage on vLLM with vLLM itself.

Three ways to the same tokens, each in processes of its own, of which one works at a time:
    stage     a pipeline of one stage: supervised worker, rings, the client's iterator, one piece of text per token
    generate  ``LLM.generate`` in process: no streaming, all answers at the end
    async     ``AsyncLLM``, vLLM's own streaming client; on a CPU its engine and the model have a process each

A round is ``batch`` concurrent greedy requests of ``--tokens`` tokens each. The ways take turns round by round, and the
first round is not counted. A round's speed is all its tokens divided by the time from the first request to the last
token; ``first`` is the median time to a request's first piece. ``stage is`` is the median over the rounds of the
stage's speed relative to the other way's.

There are two models: SmolLM2, and one of its form so small that nearly all time is spent outside of the model. ``step``
is a round's time per token, ``model`` the part of it in the model's forward and logits. ``at most`` is the bound on any
speedup over AsyncLLM with the same model: its step divided by its model time.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

CHECKPOINT = "smollm2-135m-instruct"
QUESTION = "Tell me something about the sea."
WAYS = ("stage", "generate", "async")
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2 135M": {},
    "small": {"load_format": "dummy", "hf_overrides": {**SIZES, **HEADS}},
}
"""Further ``engine_args`` by model."""
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 29,
    "max_model_len": 512,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 32,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
}
QUIET_S = {"stage": 0.2, "generate": 0.2, "async": 2.0}
"""The pause after a round. AsyncLLM's processes poll for more work for a second."""
ANSWER = "ROUND "
"""The prefix of a result on stdout. All other lines are vLLM's."""


class Round(NamedTuple):
    """The times of one round, in seconds."""

    seconds: float
    first: Sequence[float] = ()
    """Each request's time to its first piece; empty without streaming."""
    model_s: float | None = None
    """The time in the model's forward and logits."""


class Timed:
    """Mixed into vLLM's worker (``worker_extension_cls``): measures the time that the model takes."""

    model_runner: Any

    def time_model(self) -> None:
        model = self.model_runner.get_model()
        self._model_s = 0.0
        for name in ("forward", "compute_logits"):
            setattr(model, name, partial(self._timed, getattr(model, name)))

    def _timed(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            self._model_s += time.perf_counter() - began

    def model_seconds(self) -> float:
        """Return the model's time since the last call."""
        seconds, self._model_s = self._model_s, 0.0
        return seconds


TIMED = {"worker_extension_cls": "bench.vllm.Timed"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of the model")
    parser.add_argument("--model", choices=MODELS, nargs="+", default=[*MODELS])
    parser.add_argument("--way", choices=WAYS, help="run only this way: batches from stdin, rounds to stdout")
    args = parser.parse_args()
    if args.way:
        _serve(args)
        return
    for model in args.model:
        with ExitStack() as stack:
            ways = {way: stack.enter_context(_Way(way, model)) for way in WAYS}
            print(f"\n{model}, {args.threads} threads, {args.tokens} tokens")
            print(f"{'batch':>5} {'way':9} {'tokens/s':>9} {'min':>7} {'max':>7} {'first':>8} {'step':>8} {'model':>8}")
            for batch in args.batch:
                rounds = [_rounds(ways, batch, first) for first in range(args.rounds + 1)]
                _print(batch, args.tokens, rounds[1:])


def _rounds(ways: dict[str, _Way], batch: int, first: int) -> dict[str, Round]:
    """Run a round of each way. first: the way that begins, which changes from round to round."""
    order = [WAYS[(first + at) % len(WAYS)] for at in range(len(WAYS))]
    return {way: ways[way].round(batch) for way in order}


def _print(batch: int, tokens: int, rounds: list[dict[str, Round]]) -> None:
    for way in WAYS:
        counted = [each[way] for each in rounds]
        speeds = [batch * tokens / each.seconds for each in counted]
        first = [second for each in counted for second in each.first]
        step = statistics.median(each.seconds for each in counted) / tokens
        model = [each.model_s / tokens for each in counted if each.model_s is not None]
        ratio = statistics.median(each[way].seconds / each["stage"].seconds for each in rounds)
        print(
            f"{batch:>5} {way:9} {statistics.median(speeds):9.1f} {min(speeds):7.1f} {max(speeds):7.1f}"
            f" {_ms(first)} {_ms([step])} {_ms(model)}"
            + ("" if way == "stage" else f"   stage is {ratio:.2f} times")
            + (f", at most {step / statistics.median(model):.2f}" if way == "async" else "")
        )


def _ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:5.1f} ms" if seconds else f"{'-':>8}"


class _Way:
    """A process of this program that runs the rounds of one way."""

    def __init__(self, way: str, model: str) -> None:
        command = [sys.executable, "-m", "bench.vllm", *sys.argv[1:], "--way", way, "--model", model]
        self._way = way
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def round(self, batch: int) -> Round:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{batch}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                time.sleep(QUIET_S[self._way])
                return Round(*json.loads(line.removeprefix(ANSWER)))
        raise RuntimeError(f"this process ended: {self._process.args}")

    def __enter__(self) -> _Way:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _serve(args: argparse.Namespace) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(args.threads)
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    ways: dict[str, Callable[..., None]] = {"stage": _stage, "generate": _generate, "async": _async}
    ways[args.way](args, {**ENGINE_ARGS, **MODELS[args.model[0]]})
    gc.collect()  # an engine's finalizers need an interpreter that is not shutting down


def _batches() -> Iterator[int]:
    yield from map(int, sys.stdin)


def _answer(found: Round) -> None:
    print(ANSWER + json.dumps(found), flush=True)


def _checkpoint() -> Path:
    from omni_actors.stages import assets

    return assets.prepare(CHECKPOINT, lambda note: None)


def _stage(args: argparse.Namespace, engine_args: dict[str, Any]) -> None:
    import trio

    from omni_actors import OmniSystem
    from omni_actors.config import Pipeline, Stage

    stage = Stage(
        engine="vllm",
        model=CHECKPOINT,
        threads=args.threads,
        accepts=("messages",),
        emits="text",
        options={"engine_args": {name: value for name, value in engine_args.items() if name != "disable_log_stats"}},
    )

    async def one(omni: OmniSystem, first: list[float]) -> None:
        began = time.perf_counter()
        seen = False
        async for output in omni.generate(QUESTION, max_tokens=args.tokens, ignore_eos=True):
            if output.delta and not seen:
                first.append(time.perf_counter() - began)
                seen = True

    async def a_round(omni: OmniSystem, batch: int) -> Round:
        began, first = time.perf_counter(), list[float]()
        async with trio.open_nursery() as nursery:
            for _ in range(batch):
                nursery.start_soon(one, omni, first)
        return Round(time.perf_counter() - began, first)

    async def run() -> None:
        async with OmniSystem.open(Pipeline(name="bench", stages={"llm": stage})) as omni:
            for batch in _batches():
                _answer(await a_round(omni, batch))

    trio.run(run)


def _prompt(tokenizer: Any) -> dict[str, list[int]]:
    """Return the question's tokens. Tokenizing is part of a round, as it is for the stage."""
    messages = [{"role": "user", "content": QUESTION}]
    return {"prompt_token_ids": tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)}


def _generate(args: argparse.Namespace, engine_args: dict[str, Any]) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(model=str(_checkpoint()), **engine_args, **TIMED)
    llm.collective_rpc("time_model")
    tokenizer = llm.get_tokenizer()
    sampling = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    for batch in _batches():
        llm.collective_rpc("model_seconds")
        began = time.perf_counter()
        llm.generate([_prompt(tokenizer) for _ in range(batch)], sampling, use_tqdm=False)
        _answer(Round(time.perf_counter() - began, [], llm.collective_rpc("model_seconds")[0]))


def _async(args: argparse.Namespace, engine_args: dict[str, Any]) -> None:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(_checkpoint()), **engine_args, **TIMED))
    tokenizer = engine.get_tokenizer()
    sampling = SamplingParams(
        temperature=0, max_tokens=args.tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )

    async def one(name: str, first: list[float]) -> None:
        began = time.perf_counter()
        seen = False
        async for output in engine.generate(_prompt(tokenizer), sampling, name):
            if output.outputs[0].text and not seen:
                first.append(time.perf_counter() - began)
                seen = True

    async def a_round(batch: int, number: int) -> Round:
        await engine.collective_rpc("model_seconds")
        began, first = time.perf_counter(), list[float]()
        await asyncio.gather(*(one(f"{batch}-{number}-{at}", first) for at in range(batch)))
        return Round(time.perf_counter() - began, first, (await engine.collective_rpc("model_seconds"))[0])

    async def run() -> None:
        await engine.collective_rpc("time_model")
        for number, batch in enumerate(_batches()):  # nothing else has to run while stdin blocks
            _answer(await a_round(batch, number))

    try:
        asyncio.run(run())
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
