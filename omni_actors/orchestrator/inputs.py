"""Moves the input of requests into the pipeline. The input is the client's: any of it may be invalid."""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import trio

from omni_actors.config import Limits
from omni_actors.errors import InputFailed, InvalidRequest, RequestError
from omni_actors.orchestrator.fingerprint import Fingerprint, encode_piece
from omni_actors.orchestrator.lifecycle import Event
from omni_actors.orchestrator.pieces import Input
from omni_actors.orchestrator.replay_state import Phase
from omni_actors.orchestrator.request import EndRequest, Request
from omni_actors.orchestrator.request_input import Cursor, RetainedInput
from omni_actors.protocol.chunks import OVERHEAD_BYTES
from omni_actors.protocol.messages import CLIENT, MAX_BYTES, Address
from omni_actors.supervisor.edges import Edges, InputEdge

PARAMS_BYTES = MAX_BYTES // 2
"""Largest encoded size of a request's parameters for one stage: they travel in one control message."""

INPUTS_A_TURN = 16
"""How many pieces of one request, or from one queue, are sent before other tasks run."""
REQUEST_BYTES_A_TURN, QUEUE_BYTES_A_TURN = 32 * 1024, 4 * 1024 * 1024
"""After so many bytes of one request, or from one queue, no other piece is sent before other tasks run. In a
queue, each request is sent a piece in turn, so no request takes the whole turn."""

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


class _Queue:
    """The requests whose input waits for one edge. address: the replica that the edge leads to."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.cursors = OrderedDict[Request, Cursor]()
        """How far each request's input was sent, the next one to be sent first."""
        self._sending: tuple[Request, trio.CancelScope] | None = None

    def add(self, request: Request) -> None:
        """Add a request, behind the others. If the stage starts again, it is not sent what it was being sent."""
        cursor = request.input.cursor(self.address.stage)
        if self.cursors.get(request) is not cursor:
            self.remove(request)
            self.cursors[request] = cursor

    def remove(self, request: Request) -> None:
        """Remove a request, if it waits here. It is not sent what it was being sent."""
        if self.cursors.pop(request, None) is not None and self._sending is not None and self._sending[0] is request:
            self._sending[1].cancel()

    @contextmanager
    def sending(self, request: Request) -> Iterator[None]:
        """Surround the sending of a piece of a request. ``remove`` cancels it."""
        with trio.CancelScope() as scope:
            self._sending = request, scope
            try:
                yield
            finally:
                self._sending = None


class InputMover:
    """Sends the input of requests to their stages, and reads live input as fast as the stages take it.

    Input is sent at once as far as it fits into its ring, and up to the share of a turn. The rest waits in the edge's
    queue. One task sends a queue, a piece of each request in turn, and ends with it: a task for each request would cost
    more than all else here.

    Args:
        edges: The rings between the parent and the workers.
        limits: The bounds of what is retained.
        end: Ends a request.
        require_admissible: Raises Quarantined if what has arrived of a request's live input is refused.
    """

    def __init__(
        self, edges: Edges, limits: Limits, *, end: EndRequest, require_admissible: Callable[[Request], None]
    ) -> None:
        self._edges, self._end, self._require_admissible = edges, end, require_admissible
        self._retained = RetainedInput(limits)
        self._queues: dict[InputEdge, _Queue] = {}
        """The queue of each edge that input waits for."""
        self.nursery: trio.Nursery | None = None
        """Where the tasks run; None while the orchestrator does not."""

    def admit(self, request: Request) -> None:
        """Begin to read the live input of a new request."""
        assert self.nursery is not None, "the orchestrator runs"
        for kind in request.input.segments:
            self.nursery.start_soon(self._read_to_end, request, kind)

    def close(self, request: Request) -> None:
        """Stop sending and reading a request's input, and free it."""
        for queue in self._queues.values():
            queue.remove(request)
        request.input.close(self._retained)

    def send(self, request: Request) -> None:
        """Send a request's input to each stage that is due. What cannot be sent at once waits in its edge's queue."""
        if self.nursery is None:
            return  # the system closes, and the request ends next
        for stage in request.input.due:
            if (edge := self._edge(request, stage)) is None:
                request.input.take_due(stage)
                continue
            queue = self._queues.get(edge)
            if queue is None:
                if self._send_at_once(request, stage, edge):
                    request.input.take_due(stage)
                    continue
                queue = self._queues[edge] = _Queue(request.replay_state.placement[stage])
                self.nursery.start_soon(self._send_queued, edge, queue)
            queue.add(request)
        self._note_sent(request)

    def _edge(self, request: Request, stage: str) -> InputEdge | None:
        """Return where a stage's input goes; None: the replica died, or has not confirmed a repeated ``Start``."""
        progress = request.replay_state.stages[stage]
        if progress.phase is Phase.RESTARTING or progress.address is None:
            return None
        return self._edges.inputs.get(progress.address)

    def _send_at_once(self, request: Request, stage: str, edge: InputEdge) -> bool:
        """Send a stage what there is room for, up to the share of a turn. Return False if more is to be sent.

        Nothing more is to be sent to a worker that is dying: its successor is sent all input.
        """
        cursor, address = request.input.cursor(stage), request.replay_state.placement[stage]
        pieces = nbytes = 0
        while (due := request.input.next_piece(stage)) is not None:
            if pieces == INPUTS_A_TURN or nbytes >= REQUEST_BYTES_A_TURN:
                return False
            try:
                size = edge.try_send(_encoded(request, cursor, due))
            except trio.ClosedResourceError:
                return True
            except InvalidRequest:
                return False  # the queue's task ends the request
            if size is None:
                return False
            _count(request, address, cursor, size)
            if due[1]:
                return True
            pieces, nbytes = pieces + 1, nbytes + size
        return True

    @trio.lowlevel.enable_ki_protection
    async def _send_queued(self, edge: InputEdge, queue: _Queue) -> None:
        """Run as a task: send what waits for an edge. Invalid input ends its request."""
        try:
            while queue.cursors:
                await trio.lowlevel.checkpoint()
                pieces = nbytes = 0
                while queue.cursors and pieces < INPUTS_A_TURN and nbytes < QUEUE_BYTES_A_TURN:
                    nbytes += await self._send_next(edge, queue)
                    pieces += 1
        except trio.ClosedResourceError:
            pass  # the worker dies, and its successor is sent all input
        finally:
            del self._queues[edge]
            for request, cursor in queue.cursors.items():
                self._note_done(request, queue.address.stage, cursor)

    async def _send_next(self, edge: InputEdge, queue: _Queue) -> int:
        """Send the next piece of the request that has waited longest, and return its bytes; 0: none was sent.

        The request then waits behind the others, if more of its input has arrived. Cancellation: the piece is sent or
        not. Raises trio.ClosedResourceError when the worker dies.
        """
        stage = queue.address.stage
        request, cursor = next(iter(queue.cursors.items()))
        due = request.input.next_piece(stage)
        if due is None or request.input.cursor(stage) is not cursor or self._edge(request, stage) is not edge:
            del queue.cursors[request]
            self._note_done(request, stage, cursor)
            return 0
        size: int | None = None
        try:
            encoded = _encoded(request, cursor, due)
            if (size := edge.try_send(encoded)) is None:
                with queue.sending(request):
                    size = await edge.send(encoded)
        except InvalidRequest as error:
            self._fail(request, error)
        except ValueError as error:
            self._fail(request, InvalidRequest(f"a piece of the input cannot be sent: {error}"))
        if size is not None:
            _count(request, queue.address, cursor, size)
        if queue.cursors.get(request) is not cursor:
            return size or 0
        if due[1] or request.input.next_piece(stage) is None:
            del queue.cursors[request]
            self._note_done(request, stage, cursor)
        else:
            queue.cursors.move_to_end(request)
        return size or 0

    def _note_done(self, request: Request, stage: str, cursor: Cursor) -> None:
        """Note that a stage is sent no more, unless it has started again since."""
        if request.input.cursor(stage) is cursor:
            request.input.take_due(stage)
            self._note_sent(request)

    def _note_sent(self, request: Request) -> None:
        if request.on_failure == "fail" or request.input.evicting is not None:
            entries = {stage: request.replay_state.stages[stage] for stage in request.route.entries}
            if not any(state.starts_again for state in entries.values()):
                held = [name for name, state in entries.items() if state.held]
                if request.input.drop_sent(held, self._retained):
                    request.replay_state.input_evicted = request.input.evicting
        request.input.recheck()

    @trio.lowlevel.enable_ki_protection
    async def _read_to_end(self, request: Request, kind: str) -> None:
        """Run as a task: read the live input of one kind until it ends or the request does, and close its iterator.

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
            request.live_fingerprint = Fingerprint(request.route, request.input.fixed, request.params)
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
        request.input.append(kind, piece, size + OVERHEAD_BYTES, self._retained)
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
