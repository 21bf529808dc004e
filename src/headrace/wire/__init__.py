"""Codecs, one per protocol: pure functions over bytes that know nothing of sockets, logs or sessions."""
