"""Sessions, one per protocol: bytes in, records and bytes out. They own no socket, no clock and no task."""
