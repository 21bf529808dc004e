"""Named points around a commit, at which a test can have this process killed. Does nothing else, and nothing at all
unless HEADRACE_SINK_KILL_AT is set: `renamed:3` kills when `renamed` is reached for the third time."""

import os
import signal
from typing import Final

# In the order in which a file passes them; `written` once for every row group.
POINTS: Final = (
    "opened",
    "written",
    "closed",
    "log-synced",
    "file-synced",
    "touched",
    "intent",
    "renamed",
    "directory-synced",
    "progress-saved",
)

_point, _, _count = os.environ.get("HEADRACE_SINK_KILL_AT", "").partition(":")
_left = int(_count or 1)


def reach(point: str) -> None:
    """The sink has come to a point."""
    global _left
    if point != _point:
        return
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
