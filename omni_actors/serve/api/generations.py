"""Several generations that one HTTP response relays together, such as the choices of ``n``.

Rules
1. An output is read when it is there, whichever generation it belongs to: no generation waits for another. Reading it
   starts no task, so its cost hardly depends on the number of generations.
2. One generation is the usual case, and costs nothing more than the generation itself.
3. A failure of one generation ends all of them.
4. In a stream, the connection has accepted an output when the next one is asked for, whichever generation that comes
   from (``_Streams.accept``). Otherwise a generation with a large output would stay paused, and never have a next one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import trio

from omni_actors import generations as merged
from omni_actors.generation import Generation
from omni_actors.outputs import Output


class Delivery(Protocol):
    """What tells whether the wait for a connection was cancelled, as ``trio.CancelScope`` does."""

    @property
    def cancelled_caught(self) -> bool: ...


class RelayedStream(Protocol):
    """What a response needs of ``OutputStream``."""

    @property
    def undelivered_bytes(self) -> int: ...

    def relay(self, *, whole: bool) -> None: ...

    def delivered(self, size: int) -> None: ...

    def delivering(self) -> AbstractContextManager[Delivery]: ...


class Relayed(Protocol):
    """What a response needs of a ``Generation``."""

    @property
    def stream(self) -> RelayedStream: ...

    def abort(self) -> None: ...


class Generations:
    """The generations of one response, by index. It is ``Relayed`` itself."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._all = generations
        self._streams = _Streams(generations)
        self.stream: RelayedStream = generations[0].stream if len(generations) == 1 else self._streams

    @property
    def count(self) -> int:
        """The number of generations."""
        return len(self._all)

    @classmethod
    async def begin(
        cls, submits: Sequence[Callable[[], Generation]], *, on_first: Callable[[], None] = lambda: None
    ) -> Generations:
        """Submit all requests, or none: an error of one aborts those before it. Raises as ``OmniSystem.generate``.

        There is a checkpoint between two submissions: each of them reads the whole prompt, which takes milliseconds.
        on_first: called behind the first submission, in the same turn. It may raise, too.
        Cancellation: aborts what was submitted.
        """
        begun: list[Generation] = []
        try:
            for submit in submits:
                if begun:
                    await trio.lowlevel.checkpoint()
                begun.append(submit())
                if len(begun) == 1:
                    on_first()
        except BaseException:
            for generation in begun:
                generation.abort()
            raise
        return cls(begun)

    def abort(self) -> None:
        """End all requests now. It has no effect on those that are complete."""
        for generation in self._all:
            generation.abort()

    async def outputs(self) -> AsyncGenerator[tuple[int, Output], None]:
        """Yield each output with its generation's index. Raises the error of the first generation that fails."""
        if len(self._all) == 1:
            async for output in self._all[0]:
                yield 0, output
            return
        async for output in merged.Generations(self._all):
            yield output.index, output
            self._streams.accept(output.index)


class _Deliveries:
    def __init__(self, scopes: Sequence[Delivery]) -> None:
        self._scopes = scopes

    @property
    def cancelled_caught(self) -> bool:
        return any(scope.cancelled_caught for scope in self._scopes)


class _Streams:
    """The streams of several generations."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._all = [generation.stream for generation in generations]
        self._is_whole = False

    @property
    def undelivered_bytes(self) -> int:
        return sum(stream.undelivered_bytes for stream in self._all)

    def relay(self, *, whole: bool) -> None:
        self._is_whole = whole
        for stream in self._all:
            stream.relay(whole=whole)

    def accept(self, index: int) -> None:
        """Record that the connection has accepted what was read of a stream, unless whole answers are collected."""
        if not self._is_whole:
            self._all[index].delivered(self._all[index].undelivered_bytes)

    def delivered(self, size: int) -> None:
        """Record that the connection has accepted ``size`` bytes, of the first streams first."""
        for stream in self._all:
            part = min(size, stream.undelivered_bytes)
            stream.delivered(part)
            size -= part

    @contextmanager
    def delivering(self) -> Iterator[Delivery]:
        with ExitStack() as stack:
            yield _Deliveries([stack.enter_context(stream.delivering()) for stream in self._all])
