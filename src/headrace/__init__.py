"""Headrace: a message gateway that speaks five protocols and feeds Spark."""

__version__ = "0.1.0"
