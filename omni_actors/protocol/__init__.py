"""What the parent and its workers exchange: control messages, their mailbox, and the chunks in the rings."""
