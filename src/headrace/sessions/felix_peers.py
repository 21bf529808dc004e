"""Which rights a Felix peer has, by its address and by the names in its certificate. It knows nothing of how either was
found out."""

import ipaddress
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from headrace.sessions.rights import Keyring, Rights

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


class PeerRule(Protocol):
    """One of a configuration's peers."""

    @property
    def name(self) -> str: ...
    @property
    def networks(self) -> Sequence[str]: ...
    @property
    def certificates(self) -> Sequence[str]: ...
    @property
    def publish(self) -> Sequence[str]: ...
    @property
    def subscribe(self) -> Sequence[str]: ...


class _Entry(NamedTuple):
    """A rule as a key, so that a keyring keeps its rights over a reload. What a peer must show is the key."""

    name: str
    key: str
    publish: Sequence[str]
    subscribe: Sequence[str]


class Peers:
    """The peers that are known now. One object for the life of the gateway: a reload replaces what is in it."""

    def __init__(self, rules: Iterable[PeerRule] = ()) -> None:
        self._ring = Keyring()
        self._rules: list[tuple[list[Network], frozenset[str], Rights]] = []
        self.replace(rules)

    def replace(self, rules: Iterable[PeerRule]) -> None:
        """Takes over a configuration's peers. A rule that stays keeps its Rights object, so that open sessions have
        the new filters at once; one that goes, or asks for something else, is revoked."""
        rules = list(rules)
        entries = [
            _Entry(
                one.name,
                repr((one.name, sorted(one.networks), sorted(one.certificates))),
                one.publish,
                one.subscribe,
            )
            for one in rules
        ]
        self._ring.replace(entries)
        self._rules = []
        for rule, entry in zip(rules, entries, strict=True):
            rights = self._ring.lookup(entry.key.encode())
            assert rights is not None
            networks = [ipaddress.ip_network(text) for text in rule.networks]
            self._rules.append((networks, frozenset(rule.certificates), rights))

    def find(self, host: str, certificate_names: Iterable[str] = ()) -> Rights | None:
        """The rights of the first rule that fits, or None."""
        address = ipaddress.ip_address(host.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        names = frozenset(certificate_names)
        for networks, certificates, rights in self._rules:
            if networks and not any(address in network for network in networks):
                continue
            if certificates and not certificates & names:
                continue
            return rights
        return None
