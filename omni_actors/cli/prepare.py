"""``omni-actors prepare``: find, download or convert the models and tokenizers of pipelines."""

from __future__ import annotations

import time

import click

from omni_actors import config as configuration
from omni_actors.cli.running import notes
from omni_actors.command_line import PIPELINE, click_errors
from omni_actors.plain_text import clean
from omni_actors.stages import assets
from omni_actors.system import machine


@click.command()
@click.argument("names", metavar="PIPELINE...", nargs=-1, required=True, type=PIPELINE)
def prepare(names: tuple[str, ...]) -> None:
    """Prepare the models and tokenizers of each PIPELINE (or a model itself): download them, or convert them once.

    If packages are missing, the command names all of them at once, with the command that installs them.
    """
    with click_errors():
        pipelines = [configuration.load(name) for name in names if not assets.names_a_model(name)]
    if command := machine.remedy(*pipelines):
        again = f"omni-actors prepare {' '.join(names)}"
        raise click.ClickException(f"packages are missing. Install them with\n\n  {command}\n\nand repeat: {again}")
    models = [name for name in names if assets.names_a_model(name)]
    stages = [stage for pipeline in pipelines for stage in pipeline.stages.values()]
    models += [name for stage in stages for name in (stage.model, stage.tokenizer) if name]
    try:
        for model in dict.fromkeys(models):
            if not assets.is_ready(model):
                began = time.monotonic()
                assets.prepare(model, lambda note, model=model: notes.print(f"{model}: {clean(note)}"))  # type: ignore[misc]
                notes.print(f"{model}: ready after {time.monotonic() - began:.0f} s")
    except assets.ModelNotFound as error:
        raise click.ClickException(str(error)) from error
