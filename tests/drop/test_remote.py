"""The same on filesystems that are not this machine's: S3, and one that pyarrow can rename on, as HDFS is."""

import os
from pathlib import Path

import pytest
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from headrace.drop.catalog import catalog, select
from headrace.drop.compact import compact
from headrace.drop.errors import DropError, DropOverlap
from headrace.drop.filesystems import Place, RemotePlace, place
from headrace.drop.prune import plan_prune, prune
from headrace.drop.verify import verify
from tests.drop.files import LATER, NEXT_HOUR, expected, put, rows_of


@pytest.fixture(params=["s3", "renaming"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Place, Place]:
    """A drop, and the place for its compacted files."""
    if request.param == "s3":
        bucket = request.getfixturevalue("bucket")
        drop = place(bucket.format("some/drop"))
        return drop, drop.beside("-compacted")
    filesystem = SubTreeFileSystem(os.fspath(tmp_path), LocalFileSystem())
    (tmp_path / "drop").mkdir()
    return RemotePlace("sub://drop", filesystem, "drop"), RemotePlace("sub://to", filesystem, "to")


def fill(drop: Place, here: Path, *, files: int = 6) -> None:
    """Commits files as the sink does."""
    for number in range(files):
        file = put(here, number * 10, number * 10 + 9, hour=NEXT_HOUR)
        with drop.stage(file.name) as staged:
            staged.write_bytes(file.read_bytes())
            drop.commit(staged, f"{NEXT_HOUR}/{file.name}")


def test_drop_is_verified_compacted_and_pruned(remote: tuple[Place, Place], tmp_path: Path) -> None:
    drop, to = remote
    assert not to.exists()
    fill(drop, tmp_path / "local")
    assert drop.exists()
    listed = catalog(drop)
    assert [entry.name.first for entry in listed.entries] == [0, 10, 20, 30, 40, 50]
    assert not listed.strangers
    assert listed.entries[0].size == (tmp_path / "local" / listed.entries[0].path).stat().st_size
    assert listed.entries[0].mtime > LATER - 86_400 * 365
    assert verify(drop).whole
    assert rows_of(select(drop, None), drop) == expected(range(60))

    done = compact(drop, to, target_bytes=3 * listed.entries[-1].size, now=LATER)
    assert len(done.groups) == 2
    assert compact(drop, to, now=LATER).groups == []
    assert len(catalog(to).entries) == 2
    assert not catalog(to).strangers
    assert rows_of(select(drop, to), drop, to) == expected(range(60))
    assert verify(drop, to).whole

    prune(plan_prune(drop, compacted=to, grace=-3600))
    assert [entry.name.first for entry in catalog(drop).entries] == [50]
    assert rows_of(select(drop, to), drop, to) == expected(range(60))
    assert verify(drop, to).whole
    prune(plan_prune(to, older_than=0, keep_newest=False, now=LATER))
    assert catalog(to).entries == []


def test_second_compaction_is_noticed(
    remote: tuple[Place, Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop, to = remote
    fill(drop, tmp_path / "local", files=2)
    stage = to.stage

    def late(name: str):  # type: ignore[no-untyped-def]
        monkeypatch.setattr(to, "stage", stage)
        compact(drop, to, now=LATER)
        return stage(name)

    monkeypatch.setattr(to, "stage", late)
    with pytest.raises(DropOverlap, match="does another compaction run"):
        compact(drop, to, now=LATER)
    assert len(catalog(to).entries) == 1


def test_upload_that_is_cut_short_leaves_nothing(
    remote: tuple[Place, Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop, to = remote
    fill(drop, tmp_path / "local", files=2)
    assert isinstance(to, RemotePlace)

    class Short:
        """A filesystem that says that half has arrived."""

        def __init__(self, filesystem: object) -> None:
            self.filesystem = filesystem

        def __getattr__(self, name: str) -> object:
            return getattr(self.filesystem, name)

        def open_output_stream(self, path: str) -> object:
            stream = self.filesystem.open_output_stream(path)  # type: ignore[attr-defined]
            stream.write(b"short")
            return stream

    monkeypatch.setattr(to, "filesystem", Short(to.filesystem))
    with pytest.raises(DropError, match="did not arrive whole"):
        compact(drop, to, now=LATER)
    assert catalog(to).entries == []
    assert rows_of(select(drop, to), drop, to) == expected(range(20))


def test_store_that_does_not_answer_is_said_so(bucket: str, s3_server: str) -> None:
    closed = place(bucket.replace(s3_server, "127.0.0.1:1").format("drop"))
    with pytest.raises(DropError, match=r"s3://.* cannot be used: "):
        catalog(closed)


def test_bucket_that_is_not_there_is_said_so(bucket: str) -> None:
    gone = place(bucket.replace("s3://bucket-", "s3://no-bucket-").format("drop"))
    assert catalog(gone).entries == []
    assert not gone.exists()
