"""The command ``omni-actors bench``."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click
import msgspec
from rich.status import Status
from rich.text import Text

from omni_actors.cli.bench import report, self_test
from omni_actors.cli.bench.endpoints import ENDPOINTS, Ask
from omni_actors.cli.bench.generator import Load, Run, run_load
from omni_actors.cli.bench.summary import BOUNDED, Summary, summarize
from omni_actors.cli.bench.workload import Arrivals, DatasetError, Prompt, made_prompts, read_dataset, repeated
from omni_actors.cli.running import notes, run
from omni_actors.cli.server_client import open_server
from omni_actors.command_line import KEY_OPTION, TEXT, URL, URL_OPTION, Number, require_writable
from omni_actors.plain_text import clean

FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


MAX_WORDS = 1_000_000
"""The most words of a made prompt. They are 6 MB, and a server accepts 32 MiB by default."""
RATE = Number(min=0, min_open=True, max=math.inf, max_open=True)
_NO_SOUND = "transcriptions need a --dataset of JSON lines, each with the field audio"


@click.command()
@URL_OPTION
@KEY_OPTION
@click.option("--model", type=TEXT, help="The model. By default the first one that the server lists.")
@click.option(
    "--endpoint", type=click.Choice(sorted(ENDPOINTS)), default="chat", show_default=True, help="What to ask."
)
@click.option("--speak", "spoken", is_flag=True, help="Ask for spoken answers (chat).")
@click.option("--voice", type=TEXT, default="alloy", show_default=True, help="The voice of speech.")
@click.option("--rate", type=RATE, help="Requests per second, as they arrive.")
@click.option(
    "--arrivals", type=click.Choice(get_args(Arrivals)), default="poisson", show_default=True, help="With --rate: how."
)
@click.option(
    "--concurrency", type=click.IntRange(min=1), help="Requests in progress at a time, instead of --rate. [1]"
)
@click.option("--requests", type=click.IntRange(min=1), default=32, show_default=True, help="Requests to measure.")
@click.option("--duration", "duration_s", type=Number(min=0), help="Send no request after this many seconds.")
@click.option("--warmup", type=click.IntRange(min=0), default=1, show_default=True, help="Requests sent before.")
@click.option("--timeout", "timeout_s", type=Number(min=0), default=600, show_default=True, help="Of each.")
@click.option("--words", default="16", show_default=True, metavar="N[-M]", help="Words of each made prompt.")
@click.option(
    "--dataset",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Prompts: a text with one in each line, or JSON lines with prompt, messages or audio (a path).",
)
@click.option("--max-tokens", type=click.IntRange(min=1), help="Most tokens of an answer.")
@click.option("--extra", default="{}", metavar="JSON", help="Fields to add to each body.")
@click.option("--goal", "goals", multiple=True, metavar="FIGURE=MOST", help=f"For goodput: {', '.join(BOUNDED)}.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the arrivals and the prompts.")
@click.option("--json", "json_file", type=FILE, help="Write the figures to this file, as JSON.")
@click.option("--markdown", "markdown_file", type=FILE, help="Write the table to this file too.")
@click.option("--plot", "plot_file", type=FILE, help="Draw a plot; needs the extra 'bench'.")
@click.option(
    "--self-test", "tests_itself", is_flag=True, help="Measure the generator itself, against a bare server of its own."
)
def bench(
    url: str | None,
    api_key: str | None,
    model: str | None,
    words: str,
    dataset: Path | None,
    extra: str,
    goals: tuple[str, ...],
    json_file: Path | None,
    markdown_file: Path | None,
    plot_file: Path | None,
    tests_itself: bool,
    **options: Any,
) -> None:
    """Load an OpenAI-compatible server, and report what its clients notice.

    The table is printed as Markdown. The exit code is 1 if a request failed.
    """
    if options["rate"] is not None and options["concurrency"] is not None:
        raise click.UsageError("give --rate or --concurrency, not both")
    if tests_itself and options["endpoint"] != "chat":
        raise click.UsageError("--self-test needs --endpoint chat: its server answers nothing else")
    asked = {name: options.pop(name) for name in ("spoken", "voice", "max_tokens")}
    load = Load(**{**options, "concurrency": options["concurrency"] or 1})
    bounds = dict(map(_goal, goals))
    fields = _extra(extra)
    prompts = _prompts(words, dataset, load)
    files = _Files(json_file, markdown_file, plot_file)
    found: list[tuple[Run, Summary]] = []

    async def work() -> None:
        async with (
            self_test.bare_server() if tests_itself else nullcontext(url or URL) as address,
            open_server(address, api_key, read_timeout_s=load.timeout_s) as server,
        ):
            name = self_test.MODEL if tests_itself else model or await server.first_model()
            ask = Ask(model=name, extra=fields, **asked)
            with notes.status(Text(f"asking {clean(name)} at {address}")) as status:
                done = await run_load(server, load, ask, prompts, partial(_show, status, load))
        found.append((done, summarize(done, load, bounds)))

    run(work)
    [(done, summary)] = found
    click.echo(report.markdown(summary))
    files.write(done, summary)
    if summary.errors:
        sys.exit(1)


def _show(status: Status, load: Load, ended: int) -> None:
    status.update(Text(f"{report.load_words(load)}: {ended} of {load.requests} requests have ended"))


class _Files:
    """The files of a result."""

    def __init__(self, json: Path | None, markdown: Path | None, plot: Path | None) -> None:
        self._json, self._markdown, self._plot = json, markdown, plot
        for option, path in {"--json": json, "--markdown": markdown, "--plot": plot}.items():
            if path is not None:
                require_writable(path, option)
        if plot is not None:
            try:
                accepted = report.plot_formats()  # a run of minutes should not fail at its end
            except ImportError as error:
                raise click.UsageError("--plot needs matplotlib: pip install '.[bench]' in the clone") from error
            if plot.suffix and plot.suffix.removeprefix(".").lower() not in accepted:  # without one, it is a PNG
                raise click.BadParameter(f"{plot}: accepted are {', '.join(accepted)}", param_hint="--plot")

    def write(self, done: Run, summary: Summary) -> None:
        """Write the files. Raises click.ClickException: one cannot be written."""
        try:
            if self._json is not None:
                self._json.write_bytes(msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
            if self._markdown is not None:
                self._markdown.write_text(report.markdown(summary) + "\n", encoding="utf-8")
            if self._plot is not None:
                report.plot(done, summary, self._plot)
        except OSError as error:
            raise click.ClickException(f"a file cannot be written: {error}") from error


def _prompts(words: str, dataset: Path | None, load: Load) -> Iterator[Prompt]:
    if dataset is not None:
        try:
            found = read_dataset(dataset)
        except UnicodeDecodeError as error:
            raise click.BadParameter(f"{dataset}: it is not text in UTF-8", param_hint="--dataset") from error
        except (DatasetError, OSError) as error:
            raise click.BadParameter(str(error), param_hint="--dataset") from error
        if load.endpoint == "transcriptions" and any(prompt.audio is None for prompt in found):
            raise click.BadParameter(f"{dataset}: {_NO_SOUND}", param_hint="--dataset")
        if load.endpoint in ("completions", "images", "speech") and not all(prompt.prompt for prompt in found):
            reason = f"the endpoint {load.endpoint} needs the field prompt in each line"
            raise click.BadParameter(f"{dataset}: {reason}", param_hint="--dataset")
        return repeated(found, load.seed)
    if load.endpoint == "transcriptions":
        raise click.UsageError(_NO_SOUND)
    return made_prompts(*_bounds(words), load.seed)


def _bounds(words: str) -> tuple[int, int]:
    """Return the least and the most words of a prompt. Raises click.BadParameter."""
    shortest, _, longest = words.partition("-")
    if not shortest.isdecimal() or not (longest or shortest).isdecimal():
        raise click.BadParameter(f"{words!r} is not a number or a range such as 16-64", param_hint="--words")
    if any(len(each) > len(str(MAX_WORDS)) or int(each) > MAX_WORDS for each in (shortest, longest or shortest)):
        raise click.BadParameter(f"{words!r:.80}: a prompt has at most {MAX_WORDS} words", param_hint="--words")
    low, high = int(shortest), int(longest or shortest)
    if not 1 <= low <= high:
        raise click.BadParameter(
            f"{words!r}: the first number must be at least 1, and at most the second", param_hint="--words"
        )
    return low, high


def _goal(goal: str) -> tuple[str, float]:
    name, _, bound = goal.partition("=")
    try:
        value = float(bound)
    except ValueError:
        value = float("nan")
    if name not in BOUNDED or not value >= 0:
        raise click.BadParameter(
            f"{goal!r}: accepted is FIGURE=MOST with one of {', '.join(BOUNDED)}", param_hint="--goal"
        )
    return name, value


def _extra(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"{text!r:.200} is not a JSON object: {error}", param_hint="--extra") from error
