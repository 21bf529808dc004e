"""Measures the gateway beside nats-server, Redis and plain memory copy: one run, one machine, one sender."""
