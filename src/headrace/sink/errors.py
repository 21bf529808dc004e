"""What can go wrong with a sink, sorted by what an operator can do about it. Knows nothing of how it is told."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal, TypeAlias, get_args

from headrace.errors import HeadraceError, LogError

Reason: TypeAlias = Literal["space", "rights", "unreachable", "io", "log", "bug"]
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)

_BY_NUMBER: Final[dict[int, Reason]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "space"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "rights"),
    **dict.fromkeys(
        (
            errno.ENOENT,
            errno.ENOTDIR,
            errno.EEXIST,  # a file where a directory should be
            errno.ENODEV,
            errno.ENXIO,
            errno.ENOTCONN,
            errno.ESTALE,
            errno.ETIMEDOUT,
            errno.EHOSTUNREACH,
            errno.ENETUNREACH,
            errno.ECONNREFUSED,
            errno.ECONNRESET,
        ),
        "unreachable",
    ),
}  # fmt: skip

# How pyarrow's filesystems tell of what has no number.
_BY_WORD: Final[tuple[tuple[str, Reason], ...]] = (
    ("ACCESS_DENIED", "rights"),
    ("INVALID_ACCESS_KEY_ID", "rights"),
    ("INVALID_CLIENT_TOKEN_ID", "rights"),
    ("SIGNATURE_DOES_NOT_MATCH", "rights"),
    ("UNRECOGNIZED_CLIENT", "rights"),
    ("EXPIRED_TOKEN", "rights"),
    ("Forbidden", "rights"),
    ("NETWORK_CONNECTION", "unreachable"),
    ("NO_SUCH_BUCKET", "unreachable"),
    ("SERVICE_UNAVAILABLE", "unreachable"),
    ("SLOW_DOWN", "unreachable"),
    ("REQUEST_TIMEOUT", "unreachable"),
    ("INTERNAL_FAILURE", "unreachable"),
    ("curlCode", "unreachable"),
    ("Unable to load libhdfs", "unreachable"),
    ("HDFS connection failed", "unreachable"),
)


class SinkError(HeadraceError):
    """A sink cannot do its work now; the text says why."""

    def __init__(self, text: str, reason: Reason = "io") -> None:
        super().__init__(text)
        self.reason: Reason = reason


class SinkLocked(SinkError):
    """Another sink writes this drop from this log."""

    def __init__(self, text: str) -> None:
        super().__init__(text, "rights")


def reason_of(error: BaseException) -> Reason:
    """The class of a failure."""
    match error:
        case SinkError():
            return error.reason
        case LogError():
            return "log"
        case OSError():
            if error.errno is not None and error.errno in _BY_NUMBER:
                return _BY_NUMBER[error.errno]
            text = str(error)
            return next((reason for word, reason in _BY_WORD if word in text), "io")
    return "bug"


def text_of(error: BaseException) -> str:
    """What a failure says, in one line: some libraries add pages."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror.splitlines()[0]}"
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, HeadraceError | OSError) and text else f"{type(error).__name__}: {text}"


@contextmanager
def in_the_log() -> Iterator[None]:
    """Whatever fails in here is the log's fault, not the drop's."""
    try:
        yield
    except (OSError, HeadraceError) as error:
        raise SinkError(f"the log: {text_of(error)}", "log") from error
