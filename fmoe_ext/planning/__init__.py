"""Plan a run before it starts: simulate the steps of a cluster, place experts by their load."""
