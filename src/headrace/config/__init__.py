"""The gateway's configuration: typed, layered from a file, the environment and the command line, and
explained. Knows nothing of the parts that it configures."""

from headrace.config.load import Loaded, load
from headrace.config.schema import (
    PROTOCOLS,
    BlipmqListener,
    Config,
    FelixListener,
    Key,
    ListenerConfig,
    OverhopListener,
    Protocol,
    RelinkListener,
    ZeroctlListener,
    reloadable,
)

__all__ = [
    "PROTOCOLS",
    "BlipmqListener",
    "Config",
    "FelixListener",
    "Key",
    "ListenerConfig",
    "Loaded",
    "OverhopListener",
    "Protocol",
    "RelinkListener",
    "ZeroctlListener",
    "load",
    "reloadable",
]
