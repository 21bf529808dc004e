"""Which topic an address of a listener has in a configuration, and what the listeners call a topic: the protocols' own
rules and those of [[map]]. Starts nothing."""

from collections.abc import Callable, Iterator

from headrace import limits
from headrace.config import Config, Protocol
from headrace.config.maps import endpoint_rule, map_of
from headrace.config.schema import EndpointConfig
from headrace.mapping import Map
from headrace.sessions.queues import BadQueueName, check_name, filter_for, topic_for
from headrace.sessions.relink import Endpoint
from headrace.trie import matches
from headrace.wire.felix import address_of, join_address, split_address, topic_of
from headrace.wire.zeroctl import is_key_text

MOST_DIGITS = 20  # of a channel's number


def topic_of_address(config: Config, listener: Protocol, address: str) -> str:
    """The topic that an address, written as on the command line, has; ValueError if it has none."""
    topic = _TOPIC[listener](config, address)
    size = len(topic.encode())
    if not 0 < size <= limits.TOPIC_BYTES:
        raise ValueError(f"a topic has 1 to {limits.TOPIC_BYTES} bytes, not {size}")
    return topic


def addresses_of_topic(config: Config, listener: Protocol, topic: str) -> list[str]:
    """What a listener's peers who want a topic's messages ask for; nothing if they cannot."""
    return list(_NAMES[listener](config, topic))


def _mapped(own: Map, address: str) -> str:
    topic = own.topic(address.encode())
    if topic is None:
        raise ValueError(own.refusal(address.encode()))
    return topic.decode()


def _by_map(config: Config, listener: Protocol, topic: str) -> Iterator[str]:
    own = map_of(config, listener)
    found = topic.encode() if own is None else own.address(topic.encode())
    if found is not None:
        yield found.decode()


def _blipmq_topic(config: Config, address: str) -> str:
    own = map_of(config, "blipmq")
    return address if own is None else _mapped(own, address)


def _zeroctl_topic(config: Config, address: str) -> str:
    if not is_key_text(address):
        raise ValueError(f"{address!r} is no routing key")
    own = map_of(config, "zeroctl")
    return address if own is None else _mapped(own, address)


def _felix_topic(config: Config, address: str) -> str:
    own, parts = map_of(config, "felix"), split_address(address)
    if not _registered(config, parts):
        raise ValueError(f"listen.felix.streams does not have {address!r}, and listen.felix.strict is on")
    if own is None:
        return topic_of(*parts)
    plain = "/".join(parts)
    if "/" in parts[0] or "/" in parts[1]:  # which of its slashes are separators is not to be seen
        raise ValueError(own.refusal(plain.encode()))
    return _mapped(own, plain)


def _registered(config: Config, parts: tuple[str, str, str]) -> bool:
    felix = config.listen.felix
    return not felix.strict or parts in map(split_address, felix.streams)


def _overhop_topic(config: Config, address: str) -> str:
    try:
        check_name(address)
    except BadQueueName as error:
        raise ValueError(str(error)) from None
    own = map_of(config, "overhop")
    return topic_for(address) if own is None else _mapped(own, address)


def _relink_topic(config: Config, address: str) -> str:
    name, slash, channel = address.rpartition("/")
    for endpoint in config.endpoints:
        if slash and endpoint.name == name:
            size = endpoint.connector_id_bytes
            if not _number(channel) or not _fits(int(channel), size):
                raise ValueError(f"a channel of {name!r} is a number of {size} bytes, not {channel!r:.80}")
            return _endpoint(config, endpoint).publish.replace("{channel}", str(int(channel)))
    raise ValueError(f"there is no endpoint {name!r}; an address of Relink is endpoint/channel")


def _zeroctl_names(config: Config, topic: str) -> Iterator[str]:
    return (name for name in _by_map(config, "zeroctl", topic) if is_key_text(name))


def _felix_names(config: Config, topic: str) -> Iterator[str]:
    own, parts = map_of(config, "felix"), None
    if own is None:
        parts = address_of(topic)
    elif (found := own.address(topic.encode())) is not None:
        tenant, namespace, stream = found.decode().split("/", 2)
        parts = tenant, namespace, stream
    if parts is not None and _registered(config, parts):
        yield join_address(*parts)


def _overhop_names(config: Config, topic: str) -> Iterator[str]:
    """The queues of the configuration that take the topic's messages."""
    own = map_of(config, "overhop")
    for queue in config.queues:
        filter = queue.filter or (filter_for(queue.name) if own is None else _mapped(own, queue.name))
        if matches(filter, topic):
            yield queue.name


def _relink_names(config: Config, topic: str) -> Iterator[str]:
    """The channels on which the topic's messages are delivered."""
    for one in config.endpoints:
        endpoint = _endpoint(config, one)
        channel = _channel(endpoint, topic)
        if channel is not None:
            yield f"{endpoint.name}/{channel}"


def _endpoint(config: Config, one: EndpointConfig) -> Endpoint:
    return Endpoint(
        one.name,
        listener_size=one.listener_id_bytes,
        publish=endpoint_rule(config, one, "publish"),
        deliver=endpoint_rule(config, one, "deliver"),
    )


def _channel(endpoint: Endpoint, topic: str) -> int | None:
    before, found, after = endpoint.deliver.partition("{channel}")
    if not found:
        return 0 if matches(endpoint.deliver, topic) else None
    word = topic[len(before) : len(topic) - len(after)]
    if topic != f"{before}{word}{after}" or not _number(word) or str(int(word)) != word:
        return None
    return int(word) if _fits(int(word), endpoint.listener_size) else None


def _number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS


def _fits(channel: int, size: int) -> bool:
    return channel < 1 << 8 * size


_TOPIC: dict[Protocol, Callable[[Config, str], str]] = {
    "blipmq": _blipmq_topic,
    "overhop": _overhop_topic,
    "relink": _relink_topic,
    "zeroctl": _zeroctl_topic,
    "felix": _felix_topic,
}
_NAMES: dict[Protocol, Callable[[Config, str], Iterator[str]]] = {
    "blipmq": lambda config, topic: _by_map(config, "blipmq", topic),
    "overhop": _overhop_names,
    "relink": _relink_names,
    "zeroctl": _zeroctl_names,
    "felix": _felix_names,
}
