"""An HTTP server for a pipeline, compatible with OpenAI's API.

Rules
1. The server only translates. The pipeline decides which requests it accepts, and its refusals reach the client.
2. Every error response has OpenAI's error object. Only ``api.errors`` maps errors of the system to statuses.
3. A response is sent while it is made. Its status is sent with its first piece, so an error before that has its own.
4. A client that disconnects cancels its handler (``http.exchange``), which aborts its request in every stage.
"""
