"""Several nodes: which node each worker runs on, the links between rings of two nodes, and the agents."""
