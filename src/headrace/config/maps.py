"""What the rules of [[map]] come to for each listener, and which of them do not go together. Knows nothing of
sessions."""

from collections.abc import Iterator
from itertools import combinations
from typing import Literal, TypeAlias

from headrace.config.conflict import Conflict
from headrace.config.schema import Config, EndpointConfig, MapRule, Protocol
from headrace.mapping import Map, Rule

Direction: TypeAlias = Literal["publish", "deliver"]

# Keys that the gateway itself reads and answers to as a node of zeroctl: they are topics as they are.
ZEROCTL_KEPT = ("discovery.{rest...}", "service.{rest...}", "reply.{rest...}")


def map_of(config: Config, listener: Protocol) -> Map | None:
    """The map of a listener; None if its addresses follow the protocol's own rule."""
    rules = [Rule(one.address, one.topic) for one in config.map if one.listener == listener]
    if rules and listener == "zeroctl":
        rules += [Rule(kept, kept) for kept in ZEROCTL_KEPT]
    return Map(rules) if rules else None


def endpoint_rule(config: Config, endpoint: EndpointConfig, direction: Direction) -> str:
    """The rule of a Relink endpoint: its own, or what [[map]] says; empty if it is the protocol's own. ValueError if
    [[map]] has rules and none for it."""
    own = getattr(endpoint, direction)
    rules = [
        Rule(one.address, one.topic)
        for one in config.map
        if one.listener == "relink" and one.direction == direction
    ]
    if own or not rules:
        return str(own)
    address = f"{endpoint.name}/{{channel}}".encode()
    topic = Map(rules).topic(address)
    if topic is None:
        raise ValueError(Map.refusal(address))
    return topic.decode()


def conflicts(config: Config) -> Iterator[Conflict]:
    """Rules that have no way back, or none of their own."""
    whole: list[tuple[str, MapRule, Rule]] = []
    for index, one in enumerate(config.map):
        key = f"map[{index}]"
        try:
            rule = Rule(one.address, one.topic)
        except ValueError as error:
            yield Conflict((key,), str(error))
            continue
        whole.append((key, one, rule))
        if wrong := _unlike_the_protocol(one, rule):
            yield Conflict((key,), wrong)
        elif one.listener == "zeroctl":
            yield from _kept(key, rule)
    for (first, one, rule), (second, other, another) in combinations(whole, 2):
        if (one.listener, one.direction) == (other.listener, other.direction):
            yield from _in_common(first, rule, second, another)
    if whole:
        yield from _endpoints(config)
    if len(whole) == len(config.map):
        yield from _queues(config)


def _in_common(first: str, rule: Rule, second: str, other: Rule) -> Iterator[Conflict]:
    for side, mine, theirs in (
        ("addresses", rule.address, other.address),
        ("topics", rule.topic, other.topic),
    ):
        if mine.meets(theirs):
            yield Conflict(
                (second, first), f'"{theirs.text}" and "{mine.text}" of {first} have {side} in common'
            )


def _kept(key: str, rule: Rule) -> Iterator[Conflict]:
    for text in ZEROCTL_KEPT:
        kept = Rule(text, text)
        if rule.address.meets(kept.address) or rule.topic.meets(kept.topic):
            yield Conflict(
                (key,), f'"{text}" is for zeroctl\'s nodes, and stays as it is: leave it out of the rule'
            )


def _unlike_the_protocol(one: MapRule, rule: Rule) -> str:
    """Why a rule's addresses are none of its protocol; empty if they are."""
    address, slashes = rule.address, [at for at, sep in enumerate(rule.address.separators) if sep == "/"]
    if one.listener != "relink" and one.direction != "both":
        return 'only listener = "relink" has a direction: another rule goes both ways'
    match one.listener:
        case "felix":
            if len(slashes) < 2:
                return 'an address of Felix is "tenant/namespace/stream"'
        case "overhop":
            if address.separators:
                return "an address of Overhop is a queue's name, which has no dots and no slashes"
        case "relink":
            if one.direction == "both":
                return 'say direction = "publish" or "deliver": an endpoint that did both would hear itself'
            alone = "channel" in rule.topic.names and rule.topic.alone("channel")
            if not address.text.endswith("/{channel}") or not alone:
                return (
                    'an address of Relink is "endpoint/{channel}", and {channel} is a whole word of its topic'
                )
        case "zeroctl":
            if not address.text.isascii() or not address.text.isprintable():
                return "a routing key of zeroctl is printable ASCII"
            if any(word.before in ("*", "#") and not word.name for word in address.words):
                return 'no word of a routing key is "*" or "#"'
    return ""


def _endpoints(config: Config) -> Iterator[Conflict]:
    directions: tuple[Direction, ...] = ("publish", "deliver")
    for index, endpoint in enumerate(config.endpoints):
        for direction in directions:
            try:
                endpoint_rule(config, endpoint, direction)
            except ValueError as error:
                yield Conflict(
                    (f"endpoints[{index}].{direction}", "map"), f"{error}; give it one, or its own"
                )


def _queues(config: Config) -> Iterator[Conflict]:
    """Queues that no rule has a topic for: also one with a filter needs it, for the jobs that are put there by name."""
    own = map_of(config, "overhop")
    for index, queue in enumerate(config.queues):
        if own is not None and own.topic(queue.name.encode()) is None:
            yield Conflict(
                (f"queues[{index}].name", "map"), f"{own.refusal(queue.name.encode())}; give it one"
            )
