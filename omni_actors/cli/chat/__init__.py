"""``omni-actors chat``: a conversation in the terminal, with a server or with a pipeline that runs here.

Rules
1. There is one way to get an answer: HTTP. For a pipeline, the command runs a server on this machine, with a key of its
   own, for as long as it lasts.
2. Ctrl-C stops an answer. What was received of it stays in the conversation. At the prompt, Ctrl-C clears the line.
3. Standard output has the answers alone. Everything else is on standard error, so that a pipe gets text.
4. Text of a server is printed without control characters: an answer cannot change the terminal.
5. Text from a pipe is text, also a line that begins with "/", unless the user asks for commands (``--commands``).
"""
