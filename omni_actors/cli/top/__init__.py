"""``omni-actors top``: the live state of a server in the terminal.

Rules
1. The stream of the live state is the only source. Rates are the differences of its counters over one refresh.
   The rates of links are those of the last two seconds: other nodes report their counters twice a second.
2. When the connection is lost, the last state stays on the screen, with the reason, and the command connects again.
3. What does not fit is left out at the end: requests first, then rings, then links.
4. A ring between two nodes is shown as a link.
"""
