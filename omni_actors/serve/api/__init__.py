"""The data formats of the HTTP API: request bodies, their schemas, responses and errors."""
