"""Ask a question. Print the answer, and write its speech to answer.wav, as they are generated."""

import trio

from omni_actors import AudioChunk, OmniSystem
from omni_actors.output_files import SoundWriter


async def main() -> None:
    async with OmniSystem.open("voice") as omni:
        with SoundWriter("answer.wav") as file:
            async for out in omni.generate("Why is the sky blue?", modalities=("text", "audio"), max_tokens=60):
                if isinstance(out.delta, str):
                    print(out.delta, end="", flush=True)
                elif isinstance(out.delta, AudioChunk):
                    await file.write(out.delta)
                if out.metrics:
                    print(f"\nfirst text {out.metrics.ttft_s:.2f} s, first sound {out.metrics.ttfa_s:.2f} s")


trio.run(main)
