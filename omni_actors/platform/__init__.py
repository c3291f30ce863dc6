"""Linux mechanisms of parent and workers; each can be removed by itself."""
