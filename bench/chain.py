"""The baseline of ``bench.voice``: the same models in one process, one after the other, without workers or rings.

Reads a question a line on standard input; answers each with a line of JSON: ttft_s, ttfa_s, last_token_s, total_s,
audio_s, text. Run by ``bench.voice``; the argument is the number of native threads.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np

from omni_actors import config
from omni_actors.stages import assets
from omni_actors.stages.base import CLIENT, Chunk, StageContext, StageEngine, StageFailure, StageOutput, StageRequest
from omni_actors.stages.registry import ENGINES
from ringbuf import Tensor


def open_stage(name: str, threads: int) -> StageEngine:
    """Open the engine of a stage of the voice pipeline in this process."""
    pipeline = config.load("voice")
    stage = pipeline.stages[name]
    module, _, factory = ENGINES[stage.engine].factory.partition(":")
    engine: StageEngine = getattr(__import__(module, fromlist=[factory]), factory)(
        StageContext(
            stage=name,
            model=assets.resolve(stage.model) if stage.model else None,
            options=pipeline.options(name),
            threads=threads,
            device=stage.device,
            report=lambda note: None,
        )
    )
    return engine


def outputs(engine: StageEngine) -> list[StageOutput]:
    """Yield the engine's outputs until it is not busy."""
    given: list[StageOutput] = []
    while engine.busy:
        for output in engine.step():
            if isinstance(output, StageFailure):
                raise output.error
            given.append(output)
    return given


def passed_on(source: str, seq: int, output: StageOutput) -> Chunk:
    """Turn an output into the next stage's input."""

    tensors = {
        name: Tensor.of_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in output.tensors.items()
    }
    return Chunk(source=source, seq=seq, last=output.last, tensors=tensors, data=output.data)


def answer(
    number: int, question: str, llm: StageEngine, acoustic: StageEngine, vocoder: StageEngine
) -> dict[str, object]:
    """Run one question through the chain. Each stage runs as far as it can before its upstream stage continues."""
    began = time.monotonic()
    llm.start(StageRequest(number, (CLIENT,), {"max_tokens": 256}))
    acoustic.start(StageRequest(number, ("llm",), {}))
    vocoder.start(StageRequest(number, ("acoustic",), {}))
    llm.feed(
        number,
        Chunk(source=CLIENT, seq=0, last=True, tensors={}, data={"messages": [{"role": "user", "content": question}]}),
    )
    times: dict[str, float] = {}
    text, samples, spoken, heard = [], 0, 0, 0
    while llm.busy:
        for output in llm.step():
            if isinstance(output, StageFailure):
                raise output.error
            text.append(output.data.get("text", ""))
            times.setdefault("ttft_s", time.monotonic() - began)
            times["last_token_s"] = time.monotonic() - began
            acoustic.feed(number, passed_on("llm", spoken, output))
            spoken += 1
            for features in outputs(acoustic):
                vocoder.feed(number, passed_on("acoustic", heard, features))
                heard += 1
                for sound in outputs(vocoder):
                    samples += sum(tensor.shape[0] for tensor in sound.tensors.values())
                    times.setdefault("ttfa_s", time.monotonic() - began)
    return {**times, "total_s": time.monotonic() - began, "audio_s": samples / 24000, "text": "".join(text)}


def main() -> None:
    threads = int(sys.argv[1])
    os.environ["MKL_CBWR"] = "AUTO"  # as in a worker
    os.environ["OMP_NUM_THREADS"] = str(
        threads
    )  # it has the machine to itself, so its threads may spin, which is fastest
    llm, acoustic, vocoder = (open_stage(name, threads) for name in ("llm", "acoustic", "vocoder"))
    print("ready", flush=True)
    for number, line in enumerate(sys.stdin, start=1):
        print(json.dumps(answer(number, line.strip(), llm, acoustic, vocoder)), flush=True)


if __name__ == "__main__":
    main()
