"""A pipeline behind HTTP, in the shape of OpenAI's API.

Rules
1. The edge only translates: what a request may ask for, the pipeline decides, and its refusals come back as they are.
2. Every error is OpenAI's object, whatever raised it; only ``problems`` knows which status an error has.
3. An answer is sent while it is made. Its status goes with its first piece: an error before that has its own.
4. A client that is gone cancels its handler (``exchange``), and that aborts its request in every stage.
"""
