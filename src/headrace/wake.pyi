"""Whoever can be told that there is something to do: what lets the bus wake a session that it knows nothing of."""

class Waker:
    """To be derived from in compiled code."""
