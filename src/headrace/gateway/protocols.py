"""Which protocols this version speaks, and how each one's sessions are made from the bus, the keys and the
configuration. Opens no sockets."""

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from headrace import limits
from headrace.bus import Bus
from headrace.config import Config
from headrace.config import Protocol as ProtocolName
from headrace.config.maps import endpoint_rule, map_of
from headrace.nodes.gateway_node import GatewayNode, node_name, node_uuid
from headrace.nodes.registry import Verifier
from headrace.session import Session
from headrace.sessions.blipmq import Blipmq
from headrace.sessions.felix import Felix
from headrace.sessions.overhop import Overhop
from headrace.sessions.queues import Queues
from headrace.sessions.relink import Endpoint, Relink
from headrace.sessions.rights import Keyring
from headrace.sessions.zeroctl import Zeroctl
from headrace.wire.felix import HEADER_BYTES, split_address

LENGTH_FIELD = 4  # bytes in front of a BlipMQ, Overhop or zeroctl frame that its length does not count


class Speaker(Protocol):
    """One protocol, ready to be spoken in this gateway."""

    quickack: bool  # whether what peers send should be acknowledged at once
    max_frame: int  # bytes of the largest frame

    @property
    def session(self) -> Callable[[], Session] | None:
        """Makes a session for one new connection; None where connections have sessions of several kinds."""

    def configure(self, config: Config) -> None:
        """Takes over what may change while the gateway runs."""

    def counters(self) -> Mapping[str, int]:
        """What its sessions have counted, by name."""


class BlipmqSpeaker:
    # Peers pipeline publishes that are not answered: the next ones wait for the acknowledgement of these.
    quickack = True

    def __init__(self, bus: Bus, keys: Keyring, config: Config) -> None:
        self._shared = Blipmq(bus, keys, max_length=config.listen.blipmq.max_frame_bytes)
        self._shared.map = map_of(config, "blipmq")
        self.max_frame = config.listen.blipmq.max_frame_bytes + LENGTH_FIELD
        self.session = self._shared.session
        self.counters = self._shared.counters
        self.configure(config)

    def configure(self, config: Config) -> None:
        self._shared.handshake_timeout_us = round(config.listen.blipmq.handshake_timeout * 1e6)
        self._shared.block_timeout_us = round(config.log.block_timeout * 1e6)


class ZeroctlSpeaker:
    # Peers pipeline messages, and wait for confirmations only now and then.
    quickack = True

    def __init__(self, bus: Bus, keys: Keyring, config: Config) -> None:
        listen = config.listen.zeroctl
        self._shared = Zeroctl(
            bus,
            keys,
            node_name=node_name(config),
            node_uuid=node_uuid(bus),
            max_header=listen.max_header_bytes,
            max_body=listen.max_body_bytes,
            hash_inline=limits.ZEROCTL_HASH_INLINE,
        )
        self._shared.map = map_of(config, "zeroctl")
        self._shared.hash_later = self._hash_later
        self._hashers = ThreadPoolExecutor(2, thread_name_prefix="sha256")
        self._node: GatewayNode | None = None
        self.max_frame = self._shared.max_length + LENGTH_FIELD
        self.session = self._shared.session
        self.configure(config)

    def counters(self) -> dict[str, int]:
        return self._shared.counters() | (self._node.services.counters() if self._node is not None else {})

    def attach(self, node: GatewayNode, config: Config) -> None:
        """Has nodes judged by what this one has heard."""
        self._node = node
        self._shared.registry = node.registry
        self._shared.set_served(node.services.filters)
        self.configure(config)

    def configure(self, config: Config) -> None:
        listen = config.listen.zeroctl
        self._shared.handshake_timeout_us = round(listen.handshake_timeout * 1e6)
        self._shared.keepalive_us = round(listen.keepalive * 1e6)
        self._shared.block_timeout_us = round(config.log.block_timeout * 1e6)
        self._shared.anonymous = listen.anonymous
        self._shared.set_signing(listen.signed)
        if self._node is not None:
            self._shared.verifier = Verifier(self._node.registry, listen.signers)

    def _hash_later(self, body: bytes, done: Callable[[bytes], None]) -> None:
        loop = asyncio.get_running_loop()

        def work() -> None:
            digest = hashlib.sha256(body).digest()
            loop.call_soon_threadsafe(done, digest)

        self._hashers.submit(work)


class FelixSpeaker:
    """Felix, whose connections have many streams: what carries them asks `felix` for a session for each."""

    quickack = False
    session = None

    def __init__(self, bus: Bus, config: Config) -> None:
        listen = config.listen.felix
        self.felix = Felix(bus, max_length=listen.max_frame_bytes)
        self.felix.map = map_of(config, "felix")
        self.max_frame = listen.max_frame_bytes + HEADER_BYTES
        self.counters = self.felix.counters
        self.gauges = self.felix.gauges
        self.configure(config)

    def configure(self, config: Config) -> None:
        listen, felix = config.listen.felix, self.felix
        felix.block_timeout_us = round(config.log.block_timeout * 1e6)
        felix.max_subscriptions = listen.max_subscriptions
        felix.mild = listen.bad_header == "stream"
        felix.reference = listen.dialect == "reference"
        felix.batch_events = listen.batch_events
        felix.batch_bytes = listen.batch_bytes
        felix.batch_delay_us = round(listen.batch_delay * 1e6)
        felix.cache.max_entries = listen.cache_entries
        felix.cache.max_bytes = listen.cache_bytes
        felix.register(listen.strict, map(split_address, listen.streams), map(split_address, listen.caches))


class OverhopSpeaker:
    # Peers pipeline, but every message is answered.
    quickack = False

    def __init__(self, bus: Bus, keys: Keyring, config: Config) -> None:
        listen = config.listen.overhop
        queues = self.queues = Queues(
            bus,
            deadline=listen.job_deadline,
            keep_finished=listen.finished_jobs,
            most=limits.OVERHOP_QUEUES,
            map=map_of(config, "overhop"),
        )
        for queue in config.queues:
            queues.configure(
                queue.name, queue.filter, queue.concurrency_limit or None, queue.allow_job_overrides
            )
        self._shared = Overhop(
            queues,
            keys,
            key=listen.key,
            limit=listen.wire.max_envelope_size_bytes,
            unhelloed=listen.wire.session.unhelloed_max_lifetime_seconds,
            unregistered=listen.wire.session.helloed_unregistered_max_lifetime_seconds,
            ident=listen.wire.session.ident_register_timeout_seconds,
            deliver=listen.deliver,
        )
        self.max_frame = listen.wire.max_envelope_size_bytes + LENGTH_FIELD
        self.session = self._shared.session
        self.counters = self._shared.counters
        self.configure(config)

    def configure(self, config: Config) -> None:
        self._shared.block_timeout_us = round(config.log.block_timeout * 1e6)


class RelinkSpeaker:
    # What peers send is answered at once, or as soon as it is safe: the answer carries the acknowledgement.
    quickack = False

    def __init__(self, bus: Bus, keys: Keyring, config: Config) -> None:
        listen = config.listen.relink
        endpoints = [
            Endpoint(
                one.name,
                connector_size=one.connector_id_bytes,
                listener_size=one.listener_id_bytes,
                connector_transactions=one.connector_transactions,
                listener_transactions=one.listener_transactions,
                publish=endpoint_rule(config, one, "publish"),
                deliver=endpoint_rule(config, one, "deliver"),
                key=one.key,
            )
            for one in config.endpoints
        ]
        self._shared = Relink(
            bus,
            keys,
            endpoints,
            max_targets=listen.max_targets,
            max_parts=listen.max_parts,
            max_message=min(listen.max_message_bytes, config.log.segment_bytes),
            max_channels=listen.max_channels,
        )
        self.max_frame = self._shared.max_packet
        self.gauges = self._shared.gauges
        self.session = self._shared.session
        self.counters = self._shared.counters
        self.configure(config)

    def configure(self, config: Config) -> None:
        listen = config.listen.relink
        shared = self._shared
        shared.handshake_timeout_us = round(listen.handshake_timeout * 1e6)
        shared.block_timeout_us = round(config.log.block_timeout * 1e6)
        shared.ping_interval_us = round(listen.ping_interval * 1e6)
        shared.ping_timeout_us = round(listen.ping_timeout * 1e6)
        shared.grace_us = round(listen.grace * 1e6)
        shared.window = listen.window
        shared.max_outstanding = listen.max_outstanding
        shared.max_links = listen.max_links
        shared.max_uncommitted = listen.max_uncommitted_bytes
        shared.renew_keys()


SPEAKERS: dict[ProtocolName, Callable[[Bus, Keyring, Config], Speaker]] = {
    "blipmq": BlipmqSpeaker,
    "overhop": OverhopSpeaker,
    "relink": RelinkSpeaker,
    "zeroctl": ZeroctlSpeaker,
}
# Those that QUIC carries.
QUIC_SPEAKERS: dict[ProtocolName, Callable[[Bus, Config], FelixSpeaker]] = {"felix": FelixSpeaker}
