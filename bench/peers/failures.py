"""What can go wrong while measuring. Knows nothing of the causes: those are in the messages."""


class PeersError(Exception):
    """Something that stops a measurement."""


class Unavailable(PeersError):
    """A program that is needed is not there, or does not come up: the whole run stops."""


class RunFailed(PeersError):
    """One run went wrong: it is reported, and the others go on."""
