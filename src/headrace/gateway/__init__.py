"""The life of a gateway: puts log, bus, sessions, listeners and the web side together. Holds no logic of
theirs."""
