"""What must hold between the settings of a configuration whose single values are all right. Looks at files
for their presence only; knows nothing of where a value came from."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from headrace import limits
from headrace.config import maps
from headrace.config.addresses import HostPort
from headrace.config.conflict import Conflict
from headrace.config.kinds import format_duration, format_size, toml_string
from headrace.config.schema import MAIN_DROP, PROTOCOLS, Config, Protocol, dev_key


def conflicts(config: Config) -> Iterator[Conflict]:
    """Everything that does not hold."""
    yield from _log_sizes(config)
    yield from _redelivery(config)
    for protocol in PROTOCOLS:
        yield from _tls(config, protocol)
    yield from _addresses(config)
    yield from _keys(config)
    yield from _felix(config)
    yield from _drops(config)
    yield from _queues(config)
    yield from _endpoints(config)
    yield from _zeroctl(config)
    yield from maps.conflicts(config)


def cautions(config: Config) -> Iterator[str]:
    """What is allowed and yet probably not meant."""
    blipmq = config.listen.blipmq
    if blipmq.bind and not config.keys:
        yield "listen.blipmq is on and there are no keys: nobody can authenticate"
    public = [
        address for address in blipmq.addresses if isinstance(address, HostPort) and not address.loopback
    ]
    if public and any(key.key == dev_key().key for key in config.keys):
        yield f"listen.blipmq is open to other machines ({public[0]}) with the embedded key; set your keys"
    overhop = config.listen.overhop
    public = [
        address for address in overhop.addresses if isinstance(address, HostPort) and not address.loopback
    ]
    if public and not overhop.key:
        yield (
            f"listen.overhop is open to other machines ({public[0]}) and its peers may do everything; set"
            " listen.overhop.key"
        )
    zeroctl = config.listen.zeroctl
    # A header may grow by the escaping of its reserved keys, at most by 8 bytes for each 12.
    largest = zeroctl.max_header_bytes * 5 // 3 + zeroctl.max_body_bytes
    least = limits.LOG_MESSAGES_PER_SEGMENT * (largest + limits.LOG_RECORD_OVERHEAD)
    if zeroctl.bind and config.log.segment_bytes < least:
        yield (
            f"log.segment_bytes is too little for listen.zeroctl.max_body_bytes: with less than {format_size(least)}"
            " the largest messages are refused"
        )
    for index, key in enumerate(config.keys):
        for text in (*key.publish, *key.subscribe):
            if any(word not in ("*", "#") and ("*" in word or "#" in word) for word in text.split(".")):
                yield (
                    f'keys[{index}] ("{key.name}"): in {toml_string(text)} a "*" or "#" is part of a word and'
                    " so stands for itself; alone between dots it would stand for words"
                )


def _log_sizes(config: Config) -> Iterator[Conflict]:
    log = config.log
    segments = log.pool_segments + limits.LOG_SEGMENTS_BESIDE_POOL
    least = segments * log.segment_bytes
    if log.retention_bytes < least:
        yield Conflict(
            ("log.retention_bytes", "log.pool_segments", "log.segment_bytes"),
            f"{format_size(log.retention_bytes)} is too little: {segments} segments (log.pool_segments"
            f" + {limits.LOG_SEGMENTS_BESIDE_POOL}) of {format_size(log.segment_bytes)} need"
            f" {format_size(least)}",
        )
    for protocol in PROTOCOLS:
        listener = config.listen.of(protocol)
        least = limits.LOG_MESSAGES_PER_SEGMENT * (listener.largest_message + limits.LOG_RECORD_OVERHEAD)
        if listener.bind and listener.largest_message and log.segment_bytes < least:
            yield Conflict(
                ("log.segment_bytes", f"listen.{protocol}.max_frame_bytes"),
                f"{format_size(log.segment_bytes)} is too little: {limits.LOG_MESSAGES_PER_SEGMENT} messages"
                f" of listen.{protocol}.max_frame_bytes ({format_size(listener.largest_message)}) must fit in"
                " it with their headers",
            )


def _redelivery(config: Config) -> Iterator[Conflict]:
    bus = config.bus
    if bus.max_redelivery_delay < bus.redelivery_delay:
        yield Conflict(
            ("bus.max_redelivery_delay", "bus.redelivery_delay"),
            f"{format_duration(bus.max_redelivery_delay)} is less than bus.redelivery_delay,"
            f" {format_duration(bus.redelivery_delay)}",
        )


def _tls(config: Config, protocol: Protocol) -> Iterator[Conflict]:
    section = f"listen.{protocol}"
    listener = config.listen.of(protocol)
    certificate, key, client_ca = f"{section}.tls_cert", f"{section}.tls_key", f"{section}.tls_client_ca"
    if listener.tls_cert and not listener.tls_key:
        yield Conflict((certificate, key), f"a certificate needs its private key: set {key}")
    if listener.tls_key and not listener.tls_cert:
        yield Conflict((key, certificate), f"a private key needs its certificate: set {certificate}")
    if listener.tls_client_ca and not listener.tls_cert and protocol != "felix":
        yield Conflict((client_ca, certificate), f"client certificates need TLS: set {certificate} and {key}")
    files = {certificate: listener.tls_cert, key: listener.tls_key, client_ca: listener.tls_client_ca}
    for name, path in files.items():
        if path and (wrong := _unreadable(Path(path))):
            yield Conflict((name,), f"{path} {wrong}")


def _unreadable(path: Path) -> str:
    if not path.exists():
        return "does not exist"
    if not path.is_file():
        return "is not a file"
    return "" if os.access(path, os.R_OK) else "cannot be read"


def _addresses(config: Config) -> Iterator[Conflict]:
    """Two listeners on one address; Felix is on UDP, whose ports are others than TCP's."""
    taken: dict[tuple[str, str], str] = {}
    bindings = [(f"listen.{protocol}.bind", config.listen.of(protocol).addresses) for protocol in PROTOCOLS]
    for key, addresses in [*bindings, ("admin.bind", config.admin.addresses)]:
        network = "udp" if key == "listen.felix.bind" else "tcp"
        for address in addresses:
            if isinstance(address, HostPort) and address.port == 0:
                continue
            other = taken.setdefault((network, str(address)), key)
            if other != key:
                yield Conflict((key, other), f"{address} is taken by {other}")


def _keys(config: Config) -> Iterator[Conflict]:
    names: dict[str, int] = {}
    secrets: dict[str, int] = {}
    for index, key in enumerate(config.keys):
        first = names.setdefault(key.name, index)
        if first != index:
            yield Conflict((f"keys[{index}].name",), f'"{key.name}" is the name of keys[{first}], too')
        first = secrets.setdefault(key.key, index)
        if first != index:
            yield Conflict((f"keys[{index}].key",), f"it is the same as that of keys[{first}]")
        if not key.publish and not key.subscribe:
            yield Conflict(
                (f"keys[{index}]",),
                f'"{key.name}" may do nothing: give it filters to publish, to subscribe, or both, like ["#"]',
            )


def _felix(config: Config) -> Iterator[Conflict]:
    """Peers are told apart by name, and by what they show; the engine must be able to do what is asked."""
    felix, section = config.listen.felix, "listen.felix"
    names: dict[str, int] = {}
    for index, peer in enumerate(felix.peers):
        key = f"{section}.peers[{index}]"
        first = names.setdefault(peer.name, index)
        if first != index:
            yield Conflict((f"{key}.name",), f'"{peer.name}" is the name of peers[{first}], too')
        if not peer.publish and not peer.subscribe:
            yield Conflict(
                (key,),
                f'"{peer.name}" may do nothing: give it filters to publish, to subscribe, or both, like ["#"]',
            )
        if peer.certificates and not felix.tls_client_ca:
            yield Conflict(
                (f"{key}.certificates", f"{section}.tls_client_ca"),
                f"nobody is asked for a certificate: set {section}.tls_client_ca",
            )
    if not felix.bind:
        return
    if config.quic.engine == "qh3":
        if felix.tls_client_ca:
            yield Conflict(
                ("quic.engine", f"{section}.tls_client_ca"),
                "qh3 cannot ask clients for certificates: use aioquic",
            )
        if importlib.util.find_spec("qh3") is None:
            yield Conflict(
                ("quic.engine",), "qh3 is not installed here: install the extra `qh3`, or use aioquic"
            )
    if 0 < config.quic.idle_timeout <= config.quic.keep_alive:
        yield Conflict(
            ("quic.keep_alive", "quic.idle_timeout"),
            f"{format_duration(config.quic.keep_alive)} is not less than quic.idle_timeout,"
            f" {format_duration(config.quic.idle_timeout)}",
        )


def _drops(config: Config) -> Iterator[Conflict]:
    """Every drop has its own name, place and messages; the first one's name is given."""
    names = {MAIN_DROP: "drop"}
    places = {config.drop.uri.rstrip("/"): "drop"} if config.drop.uri else {}
    if not config.drop.topics:
        yield Conflict(("drop.topics",), 'nothing would go there: give it filters, like ["#"]')
    for index, drop in enumerate(config.drops):
        key = f"drops[{index}]"
        first = names.setdefault(drop.name, key)
        if first != key:
            yield Conflict((f"{key}.name",), f'"{drop.name}" is the name of {first}, too')
        place = drop.uri.rstrip("/")
        first = places.setdefault(place, key) if place else key
        if first != key:
            yield Conflict((f"{key}.uri",), f"{drop.uri} is where {first} writes, too")
        if not drop.topics:
            yield Conflict((f"{key}.topics",), 'nothing would go there: give it filters, like ["#"]')


def _queues(config: Config) -> Iterator[Conflict]:
    names: dict[str, int] = {}
    for index, queue in enumerate(config.queues):
        first = names.setdefault(queue.name, index)
        if first != index:
            yield Conflict((f"queues[{index}].name",), f'"{queue.name}" is the name of queues[{first}], too')
    name = config.listen.overhop.key
    if name and name not in [key.name for key in config.keys]:
        yield Conflict(("listen.overhop.key", "keys"), f'there is no key "{name}"')


def _endpoints(config: Config) -> Iterator[Conflict]:
    """Every endpoint has its own name, topics that exist, and a key that does."""
    names: dict[str, int] = {}
    keys = {key.name for key in config.keys}
    for index, endpoint in enumerate(config.endpoints):
        key = f"endpoints[{index}]"
        first = names.setdefault(endpoint.name, index)
        if first != index:
            yield Conflict((f"{key}.name",), f'"{endpoint.name}" is the name of endpoints[{first}], too')
        for rule, given in (("publish", endpoint.publish), ("deliver", endpoint.deliver)):
            words = endpoint.name.split(".")
            if not given and any(word in ("", "*", "#") or "{channel}" in word for word in words):
                yield Conflict(
                    (f"{key}.{rule}", f"{key}.name"),
                    f"{toml_string(endpoint.name)} is not made of words of a topic, so the rule has to be given",
                )
        if endpoint.key and endpoint.key not in keys:
            yield Conflict((f"{key}.key",), f'there is no key with the name "{endpoint.key}"')


def _zeroctl(config: Config) -> Iterator[Conflict]:
    """What zeroctl's services, carriers and anonymous peers refer to."""
    anonymous = config.listen.zeroctl.anonymous
    if anonymous and anonymous not in {key.name for key in config.keys}:
        yield Conflict(("listen.zeroctl.anonymous", "keys"), f'there is no key with the name "{anonymous}"')
    named = {
        "services": [service.name for service in config.services],
        "carriers": [carrier.name for carrier in config.carriers],
    }
    for table, names in named.items():
        for index, name in enumerate(names):
            first = names.index(name)
            if first != index:
                yield Conflict((f"{table}[{index}].name",), f'"{name}" is the name of {table}[{first}], too')
    for index, carrier in enumerate(config.carriers):
        if not carrier.take and not carrier.give:
            yield Conflict(
                (f"carriers[{index}]",),
                f'"{carrier.name}" carries nothing: give it filters to take, to give, or both, like ["event.#"]',
            )
