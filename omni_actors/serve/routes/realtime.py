"""GET /v1/realtime: conversations over a WebSocket, see ``serve.realtime``."""

from __future__ import annotations

from collections import Counter

from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from omni_actors.network_addresses import counted_address
from omni_actors.serve.http.errors import HTTPError, bad_request
from omni_actors.serve.http.websocket import DRAIN
from omni_actors.serve.pipelines import Pipelines
from omni_actors.serve.realtime.session import Session, SessionLimits
from omni_actors.serve.routes.common import require_served
from omni_actors.serve.settings import ServerSettings

PATH = "/v1/realtime"
SUBPROTOCOL = "realtime"
BUSY_RETRY_S = 10.0


class Realtime:
    """The sessions of a server.

    Args:
        pipelines: the running pipelines.
        settings: the bounds of the sessions, and of their number.

    count: the number of sessions.
    """

    def __init__(self, pipelines: Pipelines, settings: ServerSettings) -> None:
        self._pipelines, self._most = pipelines, settings.max_sessions
        self._most_per_address = settings.max_sessions_per_address or max(1, self._most // 2)
        self._limits = SessionLimits(
            duration_s=settings.session_s, max_items=settings.session_items, max_bytes=settings.session_bytes
        )
        self.count = 0
        self._per_address: Counter[str] = Counter()

    async def serve(self, websocket: WebSocket) -> None:
        """Run a session, or refuse it with an HTTP response."""
        address = counted_address(websocket.scope["client"][0])
        try:
            session = self._open(websocket, address)
        except HTTPError as error:
            await websocket.receive()
            await websocket.send_denial_response(error.response())
            return
        self.count += 1
        self._per_address[address] += 1
        try:
            subprotocol = SUBPROTOCOL if SUBPROTOCOL in websocket.scope["subprotocols"] else None
            await websocket.accept(subprotocol)
            await session.run()
        finally:
            self.count -= 1
            self._per_address[address] -= 1
            if not self._per_address[address]:
                del self._per_address[address]

    def _open(self, websocket: WebSocket, address: str) -> Session:
        """Raises HTTPError."""
        if self.count >= self._most:
            message = f"the server's sessions are all taken; the limit is {self._most}"
            raise HTTPError(429, message, code="too_many_sessions", retry_after_s=BUSY_RETRY_S)
        if self._per_address[address] >= self._most_per_address:
            message = f"this address has {self._most_per_address} sessions, which is the limit for one address"
            raise HTTPError(429, message, code="too_many_sessions", retry_after_s=BUSY_RETRY_S)
        query = websocket.query_params
        if query.get("intent") not in (None, "realtime"):
            raise bad_request("intent: accepted: 'realtime'", "intent", "unsupported_parameter")
        if "call_id" in query:
            raise bad_request("call_id: this server takes no calls", "call_id", "unsupported_parameter")
        system = self._pipelines.choose(query.get("model"))
        require_served(PATH, system.pipeline)
        name = system.pipeline.name
        model = query.get("model", name)
        return Session(
            websocket,
            system,
            self._limits,
            model=model,
            params={} if model == name else {"lora": model},
            drain=websocket.scope[DRAIN],
        )


async def upgrade_required(request: Request) -> Response:
    """Answer a request that does not ask for a WebSocket."""
    message = f"{PATH} is a WebSocket: connect to it as ws://…{PATH}"
    headers = {"upgrade": "websocket", "connection": "Upgrade"}
    raise HTTPError(426, message, code="upgrade_required", headers=headers)
