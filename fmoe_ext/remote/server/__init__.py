"""Host experts: one process, with an asyncio loop for the network and one thread that computes."""
