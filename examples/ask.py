"""Ask a question; print the answer as it is generated and write its speech to answer.wav as it is spoken."""

import soundfile
import trio

from omni_actors import AudioChunk, OmniSystem


async def main() -> None:
    async with OmniSystem.open("voice") as omni:
        with soundfile.SoundFile("answer.wav", "w", 24_000, 1) as wav:
            async for out in omni.generate("Why is the sky blue?", modalities=("text", "audio"), max_tokens=60):
                if isinstance(out.delta, str):
                    print(out.delta, end="", flush=True)
                elif isinstance(out.delta, AudioChunk):
                    wav.write(out.delta.samples)
                if out.metrics:
                    print(f"\nfirst text {out.metrics.ttft_s:.2f} s, first sound {out.metrics.ttfa_s:.2f} s")


trio.run(main)
