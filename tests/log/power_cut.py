"""What a disk holds after the power was cut: every page that was not synced is as it was before or as it is now, in any
combination, and of the last changes of names some happened and some did not. Reads what disk.c wrote down."""

import random
from pathlib import Path

PAGE = 4096
SECTOR = 512


class Names:
    """The directory's names, replayed from the journal."""

    def __init__(self, lines: list[str]) -> None:
        self.files: dict[str, int] = {}
        for line in lines:
            kind, _, rest = line.partition(" ")
            if kind == "+":
                number, _, name = rest.partition(" ")
                self.files[name] = int(number)
            elif kind == ">":
                old, _, new = rest.partition(" ")
                self.files[new] = self.files.pop(old)
            elif kind == "-":
                del self.files[rest]


def cut(directory: Path, shadow: Path, image: Path, chance: random.Random) -> None:
    """Makes `image` what could be left of `directory`. Whoever writes there must stand still."""
    lines = (shadow / "journal").read_text().splitlines()
    synced = max(number for number, line in enumerate(lines) if line == "= ") + 1
    now = {file: name for name, file in Names(lines).files.items()}
    left = Names(lines[: chance.randint(synced, len(lines))])
    newness = chance.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    sectors = chance.random() < 0.5
    image.mkdir(parents=True)
    for name, file in left.files.items():
        on_disk = (shadow / str(file)).read_bytes() if (shadow / str(file)).exists() else b""
        current = (directory / now[file]).read_bytes() if file in now else on_disk
        (image / name).parent.mkdir(exist_ok=True)
        (image / name).write_bytes(mixed(on_disk, current, newness, sectors, chance))


def mixed(old: bytes, new: bytes, newness: float, sectors: bool, chance: random.Random) -> bytes:
    old = old.ljust(len(new), b"\0")[: len(new)]
    result = bytearray(old)
    for page in range(0, len(new), PAGE):
        if old[page : page + PAGE] == new[page : page + PAGE]:
            continue
        torn = sectors and chance.random() < 0.3
        for at in range(page, page + PAGE, SECTOR) if torn else (page,):
            if chance.random() < newness:
                end = at + (SECTOR if torn else PAGE)
                result[at:end] = new[at:end]
    return bytes(result)
