"""Jobs put in, delivered and finished: the gateway over Overhop beside lists of Redis."""
