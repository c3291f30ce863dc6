"""What a stage on vLLM costs beside vLLM itself: `.venv-vllm/bin/python -m bench.vllm`, one run.

Three ways to the same tokens of SmolLM2, each in a process of its own, one after the other:
    stage     a pipeline of one stage: supervised worker, rings, the client's iterator, a piece of text a token
    generate  ``LLM.generate`` in process: no stream, all answers at the end
    async     ``AsyncLLM``, vLLM's own streaming client, its engine in a second process

A round is ``batch`` requests at once, greedy, of ``--tokens`` tokens each; the first round is not counted. Of each
round: all tokens by the time from the first request to the last token, and the median time to a first piece.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

MODEL = "smollm2-135m-instruct"
QUESTION = "Tell me something about the sea."
WAYS = ("stage", "generate", "async")
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


class Round(NamedTuple):
    seconds: float
    first: list[float]
    """Of each request, to its first piece, s; [] where nothing streams."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of the engine")
    parser.add_argument("--way", choices=WAYS, help="only this one, as JSON (what the run starts)")
    args = parser.parse_args()
    if args.way:
        print(json.dumps(dict(_measure(args))))
        return
    found = {way: _in_a_process(way) for way in WAYS}
    print(f"{'batch':>5} {'way':9} {'tokens/s':>9} {'min':>7} {'max':>7} {'first piece':>12}   stage is")
    for batch in map(str, args.batch):
        for way in WAYS:
            speed, first = found[way][batch]["tokens_s"], found[way][batch]["first_s"]
            times = f"{first * 1e3:.0f} ms" if first is not None else "-"
            ratio = statistics.median(found["stage"][batch]["tokens_s"]) / statistics.median(speed)
            print(
                f"{batch:>5} {way:9} {statistics.median(speed):9.1f} {min(speed):7.1f} {max(speed):7.1f} {times:>12}"
                + ("" if way == "stage" else f"   {ratio:.2f} times")
            )


def _in_a_process(way: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.vllm", *sys.argv[1:], "--way", way]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _measure(args: argparse.Namespace) -> Iterable[tuple[int, dict[str, Any]]]:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(args.threads)
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    ways: dict[str, Callable[..., list[list[Round]]]] = {"stage": _stage, "generate": _generate, "async": _async}
    for batch, rounds in zip(args.batch, ways[args.way](args), strict=True):
        counted = rounds[1:]
        first = [second for each in counted for second in each.first]
        yield (
            batch,
            {
                "tokens_s": [batch * args.tokens / each.seconds for each in counted],
                "first_s": statistics.median(first) if first else None,
            },
        )


def _model() -> Path:
    from omni_actors.stages import assets

    return assets.prepare(MODEL, lambda note: None)


def _stage(args: argparse.Namespace) -> list[list[Round]]:
    import trio

    from omni_actors import OmniSystem
    from omni_actors.config import Pipeline, Stage

    stage = Stage(
        engine="vllm",
        model=MODEL,
        threads=args.threads,
        accepts=("messages",),
        emits="text",
        options={"engine_args": {name: value for name, value in ENGINE_ARGS.items() if name != "disable_log_stats"}},
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

    async def run() -> list[list[Round]]:
        async with OmniSystem.open(Pipeline(name="bench", stages={"llm": stage})) as omni:
            return [[await a_round(omni, batch) for _ in range(args.rounds + 1)] for batch in args.batch]

    return trio.run(run)


def _prompt(tokenizer: Any) -> list[int]:
    messages = [{"role": "user", "content": QUESTION}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


def _generate(args: argparse.Namespace) -> list[list[Round]]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(model=str(_model()), **ENGINE_ARGS)
    prompt = {"prompt_token_ids": _prompt(llm.get_tokenizer())}
    sampling = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)

    def a_round(batch: int) -> Round:
        began = time.perf_counter()
        llm.generate([prompt] * batch, sampling, use_tqdm=False)
        return Round(time.perf_counter() - began, [])

    return [[a_round(batch) for _ in range(args.rounds + 1)] for batch in args.batch]


def _async(args: argparse.Namespace) -> list[list[Round]]:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(_model()), **ENGINE_ARGS))
    prompt = {"prompt_token_ids": _prompt(engine.get_tokenizer())}
    sampling = SamplingParams(
        temperature=0, max_tokens=args.tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )

    async def one(name: str, first: list[float]) -> None:
        began = time.perf_counter()
        seen = False
        async for output in engine.generate(prompt, sampling, name):
            if output.outputs[0].text and not seen:
                first.append(time.perf_counter() - began)
                seen = True

    async def a_round(batch: int, number: int) -> Round:
        began, first = time.perf_counter(), list[float]()
        await asyncio.gather(*(one(f"{batch}-{number}-{at}", first) for at in range(batch)))
        return Round(time.perf_counter() - began, first)

    async def run() -> list[list[Round]]:
        return [[await a_round(batch, number) for number in range(args.rounds + 1)] for batch in args.batch]

    try:
        return asyncio.run(run())
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
