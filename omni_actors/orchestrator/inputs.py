"""Moves the input of requests into the pipeline. The input is the client's: any of it may be invalid."""

from __future__ import annotations

import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec
import trio

from omni_actors.config import Limits
from omni_actors.errors import InputFailed, InvalidRequest, RequestError
from omni_actors.orchestrator.fingerprint import encode_piece, fingerprint_of
from omni_actors.orchestrator.lifecycle import Event
from omni_actors.orchestrator.pieces import Input
from omni_actors.orchestrator.replay_state import Phase
from omni_actors.orchestrator.request import EndRequest, Request
from omni_actors.orchestrator.request_input import Cursor, RetainedInput
from omni_actors.protocol.messages import CLIENT, MAX_BYTES, Address
from omni_actors.supervisor.edges import Edges

PARAMS_BYTES = MAX_BYTES // 2
"""Largest encoded size of a request's parameters for one stage: they travel in one control message."""

OVERHEAD_BYTES = 512
"""About the size of the objects around a retained piece, so that the bound covers many small pieces, too."""

_ENDED = object()
"""Returned when an iterator has ended."""


def encode_params(params: Mapping[str, Mapping[str, Any]]) -> dict[str, msgspec.Raw]:
    """Encode the parameters of each stage, once for all its ``Start`` messages.

    Raises InvalidRequest if they cannot be encoded or do not fit into a control message. It then names the largest one.
    """
    encoded: dict[str, msgspec.Raw] = {}
    for stage, share in params.items():
        try:
            encoded[stage] = msgspec.Raw(msgspec.msgpack.encode(share))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidRequest(f"the parameters of stage {stage!r} cannot be encoded: {error}") from error
        if (size := len(encoded[stage])) > PARAMS_BYTES:
            sizes = {name: len(msgspec.msgpack.encode(value)) for name, value in share.items()}
            largest = max(sizes, key=sizes.__getitem__)
            reason = f"the parameters of stage {stage!r} take {size} bytes, this one {sizes[largest]}"
            raise InvalidRequest(f"{largest}: {reason}; the limit is {PARAMS_BYTES}", param=largest)
    return encoded


class InputMover:
    """Sends the input of requests to their stages, and reads live input as fast as the stages take it.

    A piece that fits into its ring is sent at once. For the rest, a task runs that ends when all is sent.

    Args:
        edges: The rings between the parent and the workers.
        limits: The bounds of what is retained.
        end: Ends a request.
        require_admissible: Raises Quarantined if what has arrived of a request's live input is refused.
    """

    def __init__(
        self, edges: Edges, limits: Limits, *, end: EndRequest, require_admissible: Callable[[Request], None]
    ) -> None:
        self._edges, self._limits, self._end, self._require_admissible = edges, limits, end, require_admissible
        self._retained = RetainedInput()
        self.nursery: trio.Nursery | None = None
        """Where the tasks run; None while the orchestrator does not."""

    def close(self, request: Request) -> None:
        """Stop sending and reading a request's input, and free it."""
        request.input.close(self._retained)

    def send(self, request: Request) -> None:
        """Send a request's input to each stage that is due. What cannot be sent at once is sent by a task."""
        if request.input.has_task or self.nursery is None:  # None: the system closes, and the request ends next
            return
        for stage in request.input.due:
            if not self._send_at_once(request, stage):
                request.input.has_task = True
                self.nursery.start_soon(self._send_rest, request)
                return
            request.input.take_due(stage)
        self._sent(request)

    def _send_at_once(self, request: Request, stage: str) -> bool:
        """Send a stage its next piece, if there is room. Return False if more is to be sent."""
        address, cursor = self._address(request, stage), request.input.cursor(stage)
        if address is None or (due := request.input.next_piece(stage)) is None:
            return True
        try:
            size = self._edges.inputs[address].try_send(_encoded(request, cursor, due))
        except trio.ClosedResourceError:
            return True
        except InvalidRequest:
            return False  # the task ends the request
        if size is None:
            return False
        _count(request, address, cursor, size)
        return request.input.next_piece(stage) is None

    @trio.lowlevel.enable_ki_protection
    async def _send_rest(self, request: Request) -> None:
        """Run as a task: send a request's input to the stages that are due. Invalid input ends the request."""
        while due := request.input.due:
            request.input.take_due(due[0])
            try:
                with request.input.sending():
                    await self._send_to(request, due[0])
            except InvalidRequest as error:
                self._fail(request, error)
            self._sent(request)
        request.input.has_task = False

    def _sent(self, request: Request) -> None:
        placed = request.replay_state.placement.keys() & request.route.entries.keys()
        request.input.drop_sent(placed, self._retained, keep=request.on_failure == "replay")
        request.input.recheck()

    def _address(self, request: Request, stage: str) -> Address | None:
        """Return the replica that a stage's input goes to; None: it died, or has not confirmed a repeated ``Start``."""
        progress = request.replay_state.stages[stage]
        if progress.phase is Phase.RESTARTING or progress.address not in self._edges.inputs:
            return None
        return progress.address

    async def _send_to(self, request: Request, stage: str) -> None:
        """Send a stage what its incarnation lacks of the input that has arrived.

        Returns early if the incarnation dies, or has not confirmed a repeated ``Start`` yet: the stage is sent its
        input from the first piece on when it has. Raises InvalidRequest if a piece cannot be encoded, or is too large.
        Cancellation: some pieces may be sent.
        """
        address, cursor = self._address(request, stage), request.input.cursor(stage)
        if address is None:
            return
        edge = self._edges.inputs[address]
        await trio.lowlevel.checkpoint()  # here and between pieces, other tasks run
        while request.input.cursor(stage) is cursor and (due := request.input.next_piece(stage)) is not None:
            try:
                size = await edge.send(_encoded(request, cursor, due))
            except trio.ClosedResourceError:
                return
            except ValueError as error:
                raise InvalidRequest(f"a piece of the input cannot be sent: {error}") from error
            _count(request, address, cursor, size)
            await trio.lowlevel.checkpoint()

    @trio.lowlevel.enable_ki_protection
    async def read(self, request: Request, kind: str) -> None:
        """Read the live input of one kind until it ends or the request does, and close its iterator.

        An exception of the iterator ends the request with InputFailed, a wrong segment with InvalidRequest. An
        exception that the iterator raises when it is closed after the end of the request is printed on stderr.
        """
        try:
            with request.input.reading(kind):
                await self._read(request, kind)
        except RequestError as error:
            self._fail(request, error)
        except Exception as error:  # noqa: BLE001 - from the iterator's end
            if request.lifecycle.ended:
                traceback.print_exception(error)
            self._fail(request, _input_failed(kind, error))

    async def _read(self, request: Request, kind: str) -> None:
        segments = request.input.segments[kind]
        if request.live_fingerprint is None:
            request.live_fingerprint = fingerprint_of(request.route, request.input.fixed, request.params)
        try:
            iterator = aiter(segments.source)
        except Exception as error:
            raise _input_failed(kind, error) from error
        try:
            await self._until_taken(request)
            while (segment := await _next(iterator, kind)) is not _ENDED:
                self._take(request, kind, segments.to_piece(segment))
                await trio.lowlevel.checkpoint()  # the iterator may not wait
                await self._until_taken(request)
            self._take(request, kind, segments.finish())
            if not request.lifecycle.ended:
                request.input.end(kind)
                self.send(request)
        finally:
            if (close := getattr(iterator, "aclose", None)) is not None:
                await close()

    def _take(self, request: Request, kind: str, piece: Input | None) -> None:
        """Add a piece that has arrived. Raises InvalidRequest, Quarantined."""
        if piece is None or request.lifecycle.ended:  # a segment may arrive in the turn in which the request ends
            return
        assert request.live_fingerprint is not None, "the input is live"
        size = request.live_fingerprint.add(kind, piece)
        self._require_admissible(request)
        evicted = request.input.append(kind, piece, size + OVERHEAD_BYTES, self._limits, self._retained)
        if evicted is not None:
            request.replay_state.input_evicted = evicted
        self.send(request)

    async def _until_taken(self, request: Request) -> None:
        while not request.takes_input:
            await request.input.wait_sent()

    def _fail(self, request: Request, error: RequestError) -> None:
        if not request.lifecycle.ended:
            self._end(request, Event.FAIL, error)


def _encoded(request: Request, cursor: Cursor, due: tuple[Input, bool]) -> Sequence[memoryview]:
    piece, last = due
    return encode_piece(piece, request=request.dispatched_number, source=CLIENT, seq=cursor.sent, last=last)


def _count(request: Request, address: Address, cursor: Cursor, size: int) -> None:
    """Record that a replica was sent the next piece of a request's input. size: in bytes."""
    cursor.position += 1
    cursor.sent += 1
    name = str(address)
    request.sent_bytes[name] = request.sent_bytes.get(name, 0) + size


async def _next(iterator: AsyncIterator[Any], kind: str) -> Any:
    """Return the next segment, or ``_ENDED``. Raises InputFailed for an exception of the iterator."""
    try:
        return await anext(iterator, _ENDED)
    except Exception as error:
        raise _input_failed(kind, error) from error


def _input_failed(kind: str, error: Exception) -> InputFailed:
    failed = InputFailed(kind, error)
    failed.__cause__ = error
    return failed
