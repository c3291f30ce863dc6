"""The realtime API over a WebSocket: conversations of speech and text, with OpenAI's event names.

One ``Session`` is one connection. ``events`` are what clients send, ``items`` what a conversation consists of, and
``config`` is how a session is configured. ``conversation`` and ``input_audio`` keep state, ``turn_taking`` finds the
user's turns, and ``transcribing`` has their words written down. ``pipeline`` is what a session asks of the system.

A response has four modules. ``session_responses`` begins and cuts the responses of a session. ``response`` runs one,
``response_settings`` is what it was asked to be, and ``response_events`` tells the client about it. ``pacer`` decides
when its sound leaves.
"""
