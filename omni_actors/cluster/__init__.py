"""Several nodes: the links that carry a ring's records from one node to another, and the agents that run workers."""
