"""`python -m bench.realtime`: hands-free sessions on a real server, as their users hear them.

A server process serves ``voice``. Sessions are those of OpenAI's own client, over the WebSocket. Each one has a
microphone, which sends hibari's speech at real time, with white noise below it, and a player, which plays at once
(``user``). All times are those of the client. So the client's share of the machine is a part of them.

- ``kills``: questions and answers in several sessions while stages are killed, with and without standbys.
- ``barge_in``: the user speaks while an answer is played.
- ``end_of_turn``: sentences with pauses, for both kinds of turn detection.
"""
