"""The HTTP/1.1 server: sockets, connections and exchanges. It runs any ASGI application."""
