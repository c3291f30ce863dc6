"""Draw pictures of a prompt, and write each preview and each picture to a file as it is made."""

import argparse
from pathlib import Path

import trio

from omni_actors import OmniError, OmniSystem, Picture


async def main(arguments: argparse.Namespace) -> None:
    async with OmniSystem.open(arguments.pipeline) as omni:
        generations = omni.generate(
            arguments.prompt,
            modalities=("image",),
            n=arguments.n,
            size=arguments.size,
            steps=arguments.steps,
            seed=arguments.seed,
            image=arguments.image,
            previews=5,
        )
        async for output in generations:
            picture = output.delta
            if isinstance(picture, Picture):
                name = f"{output.index}.png" if picture.final else f"{output.index}-step{picture.step}.png"
                await trio.to_thread.run_sync(picture.save, name)
                print(f"{name}: {picture.width} × {picture.height}, step {picture.step} of {picture.total}")


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("prompt")
parser.add_argument("--pipeline", default="shapes", help="a pipeline or a model")
parser.add_argument("--image", type=Path, help="a picture to start from")
parser.add_argument("--size", help="width and height in pixels: 768x512")
parser.add_argument("--steps", type=int)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("-n", type=int, default=1, help="pictures, with consecutive seeds")
try:
    trio.run(main, parser.parse_args())
except OmniError as error:
    raise SystemExit(str(error)) from error
