"""Messages of the log as Arrow record batches: a cursor that fills columns without touching a Python object per row."""

import os
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Self

import pyarrow as pa

import_batch: Callable[[int, pa.Schema], pa.RecordBatch]

class ColumnReader:
    """A cursor over a log that gives its messages as record batches, each of one hour. One thread at a time uses it.

    What the log has lost, to damage or because retention was faster, is in `missing`; this reader goes on behind it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        offset: int = 0,
        *,
        node: str,
        filters: Sequence[str] = ("#",),
        leave_out: Collection[str] = (),
        payload_json: bool = False,
    ) -> None: ...
    @property
    def node(self) -> str: ...
    @property
    def log_id(self) -> str:
        """The log's id, 32 hexadecimal digits."""

    @property
    def schema(self) -> pa.Schema:
        """Of the batches: as drop.arrow_schema() says, with dictionaries for node, log, protocol, topic and source."""

    @property
    def offset(self) -> int:
        """The next offset to be looked at: all below was given in a batch, left out by the filters, or is missing."""

    @property
    def hour_of_next(self) -> int | None:
        """`ts`, in microseconds, of the row that the last batch stopped before because it is of another hour."""

    @property
    def row_bytes(self) -> int:
        """Payloads, headers and part sizes in the last batch, as the log has them, without columns left out."""

    @property
    def missing(self) -> list[tuple[int, int]]:
        """Offsets, first and last, that the log has lost to damage or retention, since they were last taken."""

    def take_missing(self) -> list[tuple[int, int]]:
        """What was noted in `missing`, which is empty afterwards."""

    def read(self, max_rows: int, max_bytes: int) -> pa.RecordBatch | None:
        """The next rows that match, all of one hour: at most `max_rows`, and none behind the one that reaches
        `max_bytes` (2^24 rows and 256 MiB at most). None where there is nothing more to read now."""

    def sync(self) -> None:
        """Returns when everything that was read is on disk, so that opening the log after a power cut finds it; OSError
        where that failed, now or earlier."""

    def close(self) -> None:
        """Lets go of the log, without a sync."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None: ...
