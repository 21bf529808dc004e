"""One reader per protocol: chunks of a byte stream in, JSON lines out, one a frame. They open no connection."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from headrace.decoders.blipmq import read_blipmq
from headrace.decoders.felix import read_felix
from headrace.decoders.lines import Line, Role
from headrace.decoders.overhop import read_overhop
from headrace.decoders.relink import read_relink
from headrace.decoders.zeroctl import read_zeroctl

# A protocol joins with one entry.
READERS: Final[dict[str, Callable[[Iterable[bytes], Role], Iterator[Line]]]] = {
    "blipmq": read_blipmq,
    "zeroctl": read_zeroctl,
    "felix": read_felix,
    "overhop": read_overhop,
    "relink": read_relink,
}
