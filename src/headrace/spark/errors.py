"""What the Spark side refuses: one class of errors for all of it."""

from headrace.errors import HeadraceError


class SparkError(HeadraceError):
    """A drop directory, an option or a schema that Spark cannot work with; the text says what to change."""
