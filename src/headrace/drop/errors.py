"""What can be wrong with a drop directory as a whole; what is wrong with single files is reported, not raised."""

from headrace.errors import HeadraceError


class DropError(HeadraceError):
    """A drop directory cannot be reached, listed or changed."""


class DropLocked(DropError):
    """Another process works in this directory."""


class DropOverlap(DropError):
    """Two files cover the same offsets, so no selection of files has every row once."""
