"""An asyncio service: it answers questions over TCP, one per line, each while it is generated.

python examples/asyncio_service.py --port 8092, and in another terminal: nc localhost 8092
"""

import asyncio
import signal

import click

from omni_actors import OmniError
from omni_actors.aio import AsyncOmni


@click.command()
@click.option("--config", default="voice", show_default=True, help="A pipeline or a model.")
@click.option("--port", default=8092, show_default=True, help="0 selects a free port.")
def main(config: str, port: int) -> None:
    """Answer questions until SIGINT or SIGTERM."""
    try:
        asyncio.run(serve(config, port))
    except (OmniError, OSError) as error:  # OSError: the port is in use
        raise click.ClickException(str(error)) from error


async def serve(config: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    clients: set[asyncio.Task[None]] = set()
    async with AsyncOmni.open(config) as omni:

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            client = asyncio.create_task(converse(omni, reader, writer))
            clients.add(client)
            client.add_done_callback(clients.discard)

        server = await asyncio.start_server(accept, "127.0.0.1", port)
        click.echo(f"listening on port {server.sockets[0].getsockname()[1]}")
        await stop.wait()
        server.close()


async def converse(omni: AsyncOmni, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one client. Any number of clients share the batches of the model."""
    try:
        async for line in reader:
            await answer(omni, line.decode(errors="replace").strip(), writer)
    except ConnectionError:
        pass  # the client has left; dropping the answer has aborted its request
    except ValueError:  # of the reader
        writer.write(b"error: a line has 64 KiB at most\n")
    finally:
        writer.close()


async def answer(omni: AsyncOmni, question: str, writer: asyncio.StreamWriter) -> None:
    try:
        async for out in omni.generate(question):
            if isinstance(out.delta, str):
                writer.write(out.delta.encode())
                await writer.drain()
    except OmniError as error:
        writer.write(f"error: {error}".encode())
    writer.write(b"\n")
    await writer.drain()


main()
