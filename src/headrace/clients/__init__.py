"""Asyncio clients, one module per wire protocol. They know the codecs and nothing of the gateway."""
