"""The data formats of the HTTP API: request bodies, their schemas, replies and errors."""
