"""QUIC for whoever carries bytes over it: the engines behind one face, and UDP in batches. It knows no protocol above
QUIC, no gateway and no configuration."""

from headrace.quic.engine import ENGINES, Engine, EngineConnection, Header, Identity, Settings, load_engine

__all__ = ["ENGINES", "Engine", "EngineConnection", "Header", "Identity", "Settings", "load_engine"]
