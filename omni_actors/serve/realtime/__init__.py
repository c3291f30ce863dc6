"""The realtime API over a WebSocket: conversations of speech and text, with OpenAI's event names.

One ``Session`` is one connection. ``events`` are what clients send, ``items`` what a conversation consists of, and
``config`` is how a session is configured. ``conversation`` and ``input_audio`` keep state, ``responding`` runs a
response, ``response_events`` tells the client about it, and ``pacer`` decides when its sound leaves.
"""
