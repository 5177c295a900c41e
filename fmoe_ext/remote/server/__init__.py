"""The server: one process, an asyncio loop for the network and one thread a device for the experts."""
