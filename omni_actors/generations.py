"""The answers to a list of prompts, each with its own outputs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec
import trio

from omni_actors.errors import RequestError
from omni_actors.generation import Generation
from omni_actors.outputs import Answer, Output


class Generations:
    """The answers to a list of prompts, as an asynchronous iterator of their outputs, in the order of their arrival.

    ``Output.index`` is the position of the prompt. Iteration raises the ``RequestError`` that ended a request, with the
    position in the attribute ``index``; iterating on continues with the others. Cancelling a read loses nothing.
    Dropping the object aborts the requests that have not ended.

    >>> async def main():
    ...     async with OmniSystem.open("echo") as omni:
    ...         return [answer.text for answer in await omni.generate(["a", "b"]).collect()]
    >>> trio.run(main)
    ['a', 'b']
    """

    def __init__(self, members: Sequence[Generation]) -> None:
        self.members = tuple(members)
        """The answer to each prompt, in the order of the prompts. Read either these or the whole."""
        self._open = dict(enumerate(members))
        self._wakeup = trio.lowlevel.ParkingLot()
        for member in members:
            member.stream.request.output_wakeup = self._wakeup

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The identifier of each request."""
        return tuple(member.request_id for member in self.members)

    def abort(self) -> None:
        """End every request now, and drop unread output; iteration then raises ``Aborted`` for each."""
        for member in self.members:
            member.abort()

    async def collect(self, *, keep_errors: bool = False) -> list[Answer]:
        """Read the rest of every answer, and return them in the order of the prompts.

        keep_errors: False: raise the error of the first request, in the order of the prompts, that failed. True: return
        such a request as an ``Answer`` with its ``error``.
        Cancellation loses nothing: the next call reads on.
        """
        answers = []
        for index, member in enumerate(self.members):
            try:
                answer = msgspec.structs.replace(await member.collect(), index=index)
            except RequestError as error:
                error.index = index
                if not keep_errors:
                    raise
                answer = Answer(index=index, error=error)
            answers.append(answer)
        return answers

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        while self._open:
            found = next((index for index, member in self._open.items() if member.stream.ready), None)
            if found is None:
                await self._wakeup.park()
            elif (output := await self._next(found)) is not None:
                return output
        raise StopAsyncIteration

    async def _next(self, index: int) -> Output | None:
        """Return the next output of a member that is ready; None: it has none, or has ended."""
        member = self._open.pop(index)
        try:
            output = await member.next_or_none()
        except StopAsyncIteration:
            return None
        except RequestError as error:
            error.index = index
            raise
        except BaseException:  # cancelled: nothing was read
            self._open[index] = member
            raise
        self._open[index] = member  # behind the others, which have their turn first
        return None if output is None else msgspec.structs.replace(output, index=index)
