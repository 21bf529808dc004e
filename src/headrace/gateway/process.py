"""The life of a gateway process: starts the parts in order, serves until it is told to stop, drains, and
ends with an exit code. Signals, reloading and readiness are here; what the parts do is theirs."""

import asyncio
import contextlib
import enum
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace import __version__, events
from headrace.admin.server import AdminServer
from headrace.admin.statistics import CarrierFigures, Figures, ListenerFigures, LogFigures
from headrace.bus import Bus
from headrace.carriers.carrier import CarrierError, Carriers
from headrace.config import PROTOCOLS, Config, Loaded, reloadable
from headrace.config import Protocol as ProtocolName
from headrace.config.checks import conflicts
from headrace.config.settings import Section, value_at
from headrace.connection import Service, Switchboard
from headrace.errors import HeadraceError, LogError
from headrace.gateway.drops import Drops
from headrace.gateway.listeners import ConnectionEvents, Listener, Tls, open_sockets
from headrace.gateway.protocols import (
    QUIC_SPEAKERS,
    SPEAKERS,
    FelixSpeaker,
    OverhopSpeaker,
    Speaker,
    ZeroctlSpeaker,
)
from headrace.gateway.quic import QuicListener, QuicTls, open_udp
from headrace.gateway.systemd import Notifier, PassedSockets
from headrace.log import Log
from headrace.nodes.gateway_node import GatewayNode
from headrace.sessions.rights import Keyring
from headrace.sink.errors import SinkLocked
from headrace.sink.plan import plans

# One buffer for all connections: a read event of the fastest sender fits, and it stays in the CPU's cache.
READ_BYTES: Final = 256 * 1024
# How often sessions are told the time, and the longest that a redelivery can be late.
TICK_SECONDS: Final = 0.25
# How often retention by age is looked after, and a log that became full is noticed.
LOG_TICK_SECONDS: Final = 1.0
# How often the heartbeat and the nodes that were not heard any more are looked after.
NODE_TICK_SECONDS: Final = 1.0
SUPPRESSED_SECONDS: Final = 60.0
# After a failed sync nothing that waits for one can leave any more; what else is on its way gets this long.
FAILED_DRAIN_SECONDS: Final = 1.0
# Finishing the files of the drops takes a sync each; at least this long, whatever drain_timeout says.
SINK_SECONDS: Final = 2.0
# Connections that were aborted are gone in the next turns of the loop.
ABORT_SECONDS: Final = 1.0
# Open files beside connections: segments, sockets that listen, the sink.
OTHER_FILES: Final = 512

ADMIN_BACKLOG: Final = 128

log = events.get("gateway")


class Happened(enum.IntFlag):
    """What Log.on_event() answers."""

    SAFE = 1
    SPACE = 2
    FAILED = 4


class StartError(HeadraceError):
    """The gateway cannot start; the text says why, in a sentence."""


class ReloadRefused(HeadraceError):
    """A new configuration cannot be taken over; nothing of it was."""


def serve(data: Path, load: Callable[[], Loaded]) -> int:
    """Runs a gateway with its log in `data` until a signal ends it; the exit code. `load` reads the
    configuration, now and whenever it is to be read again."""
    loaded = load()
    config = loaded.config
    events.setup(config.logging.level, config.logging.format)
    for warning in loaded.warnings:
        log.warning("config.caution", message=warning)
    loop_name, new_loop = choose_loop(config.gateway.loop)
    pid = os.getpid()
    gateway = Gateway(
        data, loaded, load, loop_name, Notifier(os.environ, pid), PassedSockets.inherited(os.environ, pid)
    )
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(gateway.run())


def choose_loop(wish: str) -> tuple[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop that the configuration asks for, by name and as a factory."""
    if wish != "asyncio":
        try:
            import uvloop
        except ImportError:
            if wish == "uvloop":
                raise StartError("gateway.loop is uvloop, which is not installed here") from None
        else:
            return "uvloop", uvloop.new_event_loop
    return "asyncio", asyncio.new_event_loop


def allow_files(config: Config, origins: Collection[str]) -> int:
    """Raises this process's limit on open files, as far as it may and needs to; how many connections it then has room
    for. `origins` are the keys that somebody has set."""
    # Connections over QUIC share a socket.
    names = [name for name in spoken(config) if name not in QUIC_SPEAKERS]
    wanted = sum(config.listen.of(name).max_connections for name in names)
    needed = wanted + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    allowed = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == needed:
        return wanted
    connections = max(allowed - OTHER_FILES, allowed // 2)
    # The defaults are limits, not wishes.
    wished = any(f"listen.{name}.max_connections" in origins for name in names)
    (log.warning if wished else log.info)(
        "files.limited",
        allowed=allowed,
        needed=needed,
        connections=connections,
        hint="raise the limit on open files (NOFILE) for more connections at once",
    )
    return connections


def spoken(config: Config) -> list[ProtocolName]:
    """The protocols that are to be listened for."""
    return [name for name in PROTOCOLS if config.listen.of(name).bind]


def merge(running: Config, wanted: Config, keys: list[str]) -> Config:
    """The running configuration with the values of these keys from another."""
    merged = running
    for key in keys:
        merged = _with_value(merged, key.split("."), value_at(wanted, key))
    return merged


def _with_value(section: Any, path: list[str], value: object) -> Any:
    name, *rest = path
    if rest:
        inner: Section = getattr(section, name)
        value = _with_value(inner, rest, value)
    return msgspec.structs.replace(section, **{name: value})


class Gateway:
    """One gateway, from its start to its end."""

    def __init__(
        self,
        data: Path,
        loaded: Loaded,
        load: Callable[[], Loaded],
        loop_name: str,
        notifier: Notifier,
        passed: PassedSockets,
    ) -> None:
        self.config = loaded.config
        self._origins = loaded.origins
        self._data = data
        self._load = load
        self._loop_name = loop_name
        self._notifier = notifier
        self._passed = passed
        self._started = time.time()
        self._started_monotonic = time.monotonic()
        self._listeners: dict[ProtocolName, Listener | QuicListener] = {}
        self._quic: QuicListener | None = None  # the one of these that has its connections itself
        self._speakers: dict[ProtocolName, Speaker] = {}
        self._services: dict[ProtocolName, Service] = {}
        self._admin = AdminServer(self)
        self._admin_listener = Listener("admin", [], None)
        self._log: Log | None = None
        self._bus: Bus | None = None
        self._drops: Drops | None = None
        self._node: GatewayNode | None = None
        self._carriers: Carriers | None = None
        self._keys = Keyring()
        self._full: str | None = None  # what was last said of it
        self._ready = False
        self._stopping = asyncio.Event()
        self._stop_reason = ""
        self._timers: dict[str, asyncio.TimerHandle] = {}

    async def run(self) -> int:
        """Serves until it is told to stop; the exit code."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_on_loop_error)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_stop_signal, number)
        self._loop.add_signal_handler(signal.SIGHUP, self._on_reload_signal)
        self._board = Switchboard(
            self._loop, ConnectionEvents(), read_bytes=READ_BYTES, tick_seconds=TICK_SECONDS
        )
        self._board.max_connections = allow_files(self.config, self._origins)
        if self._notifier.watchdog_seconds is not None:
            self._repeat("watchdog", self._notifier.watchdog_seconds, self._notifier.alive)
        self._repeat("suppressed", SUPPRESSED_SECONDS, events.report_suppressed)
        try:
            await self._start()
            if not self._stopping.is_set():
                self._announce()
                await self._stopping.wait()
        finally:
            await self._end()
        return 1 if self._log is not None and self._log.failed else 0

    # --- starting -------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        config = self.config
        # Sockets first: what is most likely to be wrong is found out before the log is read.
        admin = open_sockets("admin.bind", config.admin.addresses, ADMIN_BACKLOG, self._passed)
        self._admin_listener = Listener("admin", admin, None)
        for name in spoken(config):
            listen = config.listen.of(name)
            if name in QUIC_SPEAKERS:
                udp = open_udp(f"listen.{name}.bind", listen.addresses, self._passed)
                self._listeners[name] = self._quic = QuicListener(
                    config, udp, QuicTls(config, self._data) if listen.tls_cert else None
                )
                continue
            tls = Tls(listen) if listen.tls_cert else None
            sockets = open_sockets(f"listen.{name}.bind", listen.addresses, listen.backlog, self._passed)
            self._listeners[name] = Listener(name, sockets, tls)
        self._passed.close_rest()
        await self._admin_listener.start(await self._admin.start(), ADMIN_BACKLOG)

        # Recovery reads the whole log; the web side answers meanwhile.
        bus = await asyncio.to_thread(self._open_bus)
        self._bus = bus
        self._log = bus.log
        bus.schedule = lambda: self._loop.call_soon(bus.dispatch)
        self._loop.add_reader(bus.log.event_fd, self._on_log_event)
        self._drops = Drops(bus.log, self._loop, self._data, config.node.name)
        try:
            self._drops.start(plans(config, self._data), run=config.drop.run)
        except SinkLocked as error:
            raise StartError(f"{error}; drop.run = false leaves the drops to it") from error
        except OSError as error:
            raise StartError(f"cannot write {self._data / 'sink'}: {error.strerror or error}") from error
        self._repeat("log", LOG_TICK_SECONDS, self._look_after_log)
        self._tick_bus()

        self._node = GatewayNode(bus, config, self._loop.call_soon)
        # A certificate of its own is made where only one gateway is at work, as the log has found out.
        if self._quic is not None and self._quic.tls is None:
            self._quic.tls = QuicTls(config, self._data)
        self._keys.replace(config.keys)
        # All of them before the first that listens, which may let others run: the node's services serve what is left
        # of before a restart, and that finds its queues and who tells of finished jobs.
        for name in self._listeners:
            listen = config.listen.of(name)
            speaker = (
                QUIC_SPEAKERS[name](bus, config)
                if name in QUIC_SPEAKERS
                else SPEAKERS[name](bus, self._keys, config)
            )
            if isinstance(speaker, ZeroctlSpeaker):
                speaker.attach(self._node, config)
            if isinstance(speaker, OverhopSpeaker):
                services = self._node.services
                services.told_here = speaker.queues.takes
                speaker.queues.report_to(services.on_job)
            service = Service(
                name,
                speaker.session,
                max_frame=speaker.max_frame,
                high_water=listen.high_water,
                max_connections=listen.max_connections,
                stall_timeout=listen.stall_timeout,
                idle_timeout=listen.idle_timeout,
                quickack=speaker.quickack,
            )
            self._speakers[name] = speaker
            self._services[name] = service
        for name, listener in self._listeners.items():
            service = self._services[name]
            if isinstance(listener, QuicListener):
                speaker = self._speakers[name]
                assert isinstance(speaker, FelixSpeaker)
                listener.start(speaker.felix, service)
                continue
            await listener.start(_answering(self._board, service), config.listen.of(name).backlog)
        try:
            self._carriers = Carriers(
                config.carriers, bus, self._node.name, self._node.uuid, self._node.services.filters
            )
        except CarrierError as error:
            raise StartError(str(error)) from error
        self._carriers.start()
        self._repeat("node", NODE_TICK_SECONDS, self._node.tick)

    def _open_bus(self) -> Bus:
        """Opens the log and the bus on it. Runs in a thread of its own, before anybody else knows of
        either."""
        config = self.config
        path = self._data / "log"
        try:
            opened = Log(
                path,
                sync=config.log.sync,
                segment_bytes=config.log.segment_bytes,
                pool_segments=config.log.pool_segments,
                retention_bytes=config.log.retention_bytes,
                retention_seconds=config.log.retention_seconds,
                on_full=config.log.on_full,
            )
        except OSError as error:
            raise StartError(f"cannot open the log in {path}: {error.strerror or error}") from error
        recovery = opened.recovery
        log.info(
            "log.open",
            path=opened.path,
            id=opened.id_text,
            segments=recovery.segments,
            records=recovery.records,
            seconds=round(recovery.seconds, 3),
        )
        if recovery.cut_bytes:
            log.warning(
                "log.tail_cut",
                segment=recovery.cut_segment,
                position=recovery.cut_position,
                bytes=recovery.cut_bytes,
            )
        for damage in recovery.damage:
            log.error("log.damaged", **damage._asdict())
        try:
            return Bus(opened, **_bus_options(config))
        except BaseException:
            opened.close()
            raise

    def _announce(self) -> None:
        self._ready = True
        listeners = [*self._listeners.values(), self._admin_listener]
        places = [f"{one.name}={','.join(one.addresses)}" for one in listeners if one.addresses]
        with contextlib.suppress(OSError):  # nobody may be reading it
            print("headrace ready", *places, flush=True)
        log.info("gateway.ready", version=__version__, node=self.config.node.name, loop=self._loop_name)
        self._notifier.ready("serving")

    # --- while it runs --------------------------------------------------------------------------------------

    def _on_log_event(self) -> None:
        assert self._bus is not None
        happened = self._bus.log.on_event()
        if happened & Happened.SAFE:
            self._bus.on_safe()
            self._board.safe_moved()
            if self._carriers is not None:
                self._carriers.on_safe()
            if self._quic is not None:
                self._quic.safe_moved()
        if happened & Happened.SPACE:
            self._board.space_made()
            if self._quic is not None:
                self._quic.space_made()
        if happened & Happened.FAILED:
            log.error(
                "log.failed", reason=self._bus.log.failed, consequence="the gateway stops, to be started anew"
            )
            self._stop("the log has failed")

    def _tick_bus(self) -> None:
        """Redeliveries and the like, when the next one is due; a delivery may have set an earlier date
        meanwhile."""
        assert self._bus is not None
        now = time.time_ns() // 1000
        delay = TICK_SECONDS
        try:
            due = self._bus.tick(now)
            if due is not None:
                delay = min(delay, max(0.001, (due - now) / 1e6))
        except Exception as error:
            log.limited("bus.tick_failed", level=events.LEVELS["error"], exc_info=error)
        self._timers["bus"] = self._loop.call_later(delay, self._tick_bus)

    def _look_after_log(self) -> None:
        assert self._log is not None
        assert self._drops is not None
        self._log.tick()
        self._drops.tick()
        full = self._log.full
        if full != self._full:
            if full is not None:
                log.warning("log.full", reason=full)
            else:
                log.info("log.has_room")
            self._full = full

    def _repeat(self, name: str, seconds: float, do: Callable[[], None]) -> None:
        """Does this now and every so often; an error of it is told and changes nothing about the next
        time."""

        def again() -> None:
            self._timers[name] = self._loop.call_later(seconds, again)
            do()

        again()

    # --- reloading ------------------------------------------------------------------------------------------

    def _on_reload_signal(self) -> None:
        if not self._ready or self._stopping.is_set():
            log.warning("config.not_reloaded", reason="the gateway is starting or stopping")
            return
        self._notifier.reloading()
        try:
            self._reload()
        except HeadraceError as error:
            log.error(
                "config.refused", reason=str(error), consequence="the running configuration stays as it is"
            )
        self._notifier.ready("serving")

    def _reload(self) -> None:
        """Takes over what may change while running: all of it, or nothing."""
        loaded = self._load()
        wanted = loaded.config
        changed = self.config.changes(wanted)
        now = [key for key in changed if reloadable(key)]
        later = [key for key in changed if not reloadable(key)]
        merged = merge(self.config, wanted, now)
        # What needs a restart stays as it was, and with that the rest may not fit.
        for conflict in conflicts(merged):
            raise ReloadRefused(f"{', '.join(conflict.keys)}: {conflict.message} (before a restart)")
        for listener in self._listeners.values():
            if listener.tls is not None:
                listener.tls.check()
        self._origins = loaded.origins
        self._apply(merged)
        log.info("config.reloaded", changed=now, needs_restart=later)

    def _apply(self, config: Config) -> None:
        assert self._bus is not None
        self.config = config
        events.set_level(config.logging.level)
        self._board.max_connections = allow_files(config, self._origins)
        self._keys.replace(config.keys)
        self._bus.log.set_retention(config.log.retention_bytes, config.log.retention_seconds)
        self._bus.configure(**_bus_options(config))
        if self._node is not None:
            self._node.configure(config)
        for name, listener in self._listeners.items():
            listen = config.listen.of(name)
            service = self._services[name]
            service.max_connections = listen.max_connections
            service.idle_timeout = listen.idle_timeout
            service.high_water = listen.high_water
            service.stall_timeout = listen.stall_timeout
            self._speakers[name].configure(config)
            if isinstance(listener, QuicListener):
                listener.configure(config)
            if listener.tls is not None:
                listener.tls.renew()

    # --- stopping -------------------------------------------------------------------------------------------

    def _on_stop_signal(self, number: signal.Signals) -> None:
        if self._stopping.is_set():
            log.error("gateway.aborted", signal=number.name, reason="a second signal came while draining")
            sys.stderr.flush()
            # What was appended is in the page cache and survives; nothing unconfirmed was promised to
            # anybody.
            os._exit(1)
        self._stop(f"signal {number.name}")

    def _stop(self, reason: str) -> None:
        if not self._stopping.is_set():
            self._stop_reason = reason
            self._stopping.set()

    async def _end(self) -> None:
        """Ends whatever was started, in the order in which nothing is lost."""
        self._stopping.set()  # a signal from here on is a second one
        began = time.monotonic()
        if self._ready:
            log.info("gateway.stopping", reason=self._stop_reason, connections=self._connections())
        self._notifier.stopping("draining")
        for listener in self._listeners.values():
            listener.close()
        if self._carriers is not None:
            await self._carriers.stop()
        if self._node is not None:
            self._node.stop()
        await self._drain()
        if self._drops is not None:
            await self._drops.stop(max(SINK_SECONDS, self.config.gateway.drain_timeout))
        self._admin_listener.close()
        await self._admin.stop()
        for timer in self._timers.values():
            timer.cancel()
        self._board.close()
        await self._close_log()
        events.report_suppressed()
        if self._ready:
            log.info("gateway.stopped", seconds=round(time.monotonic() - began, 3))
        self._notifier.close()

    async def _drain(self) -> None:
        self._board.drain()
        if self._quic is not None:
            self._quic.drain()
        failed = self._log is not None and self._log.failed
        limit = min(self.config.gateway.drain_timeout, FAILED_DRAIN_SECONDS if failed else float("inf"))
        try:
            await asyncio.wait_for(self._wait_empty(), limit)
        except TimeoutError:
            log.warning("drain.cut_short", connections=self._connections(), seconds=limit)
            self._board.abort()
            if self._quic is not None:
                self._quic.abort()
            await asyncio.wait_for(self._wait_empty(), ABORT_SECONDS)
        if self._quic is not None:
            self._quic.shut()

    def _connections(self) -> int:
        return len(self._board) + (len(self._quic) if self._quic is not None else 0)

    async def _wait_empty(self) -> None:
        await self._board.wait_empty()
        if self._quic is not None:
            await self._quic.wait_empty()

    async def _close_log(self) -> None:
        if self._log is None:
            return
        self._loop.remove_reader(self._log.event_fd)
        try:
            if self._bus is not None:
                self._bus.close()
            # Not in the loop, which must hear of a second signal while the disk is slow.
            await asyncio.to_thread(self._log.close)
        except LogError as error:
            log.error("log.close_failed", reason=str(error))

    # --- what the web side sees -----------------------------------------------------------------------------

    def not_ready(self) -> list[str]:
        reasons = []
        if self._stopping.is_set():
            reasons.append("the gateway is stopping")
        elif not self._ready:
            reasons.append("the gateway is starting")
        if self._log is not None:
            if self._log.failed:
                reasons.append(f"the log has failed: {self._log.failed}")
            elif full := self._log.full:
                reasons.append(f"the log is full: {full}")
                reasons += self.warnings()
        return reasons

    def warnings(self) -> list[str]:
        return self._drops.failing() if self._drops is not None else []

    def figures(self) -> Figures:
        return Figures(
            version=__version__,
            node=self.config.node.name,
            loop=self._loop_name,
            started=self._started,
            uptime=time.monotonic() - self._started_monotonic,
            listeners=[self._listener_figures(name) for name in self._services],
            log=self._log_figures(),
            bus=self._bus.stats() if self._bus is not None else None,
            sinks=self._drops.figures() if self._drops is not None and self._log is not None else [],
        )

    def segments(self) -> list[Mapping[str, Any]]:
        return [one._asdict() for one in self._log.segments()] if self._log is not None else []

    def nodes(self) -> list[dict[str, Any]]:
        return self._node.shown() if self._node is not None else []

    def carriers(self) -> list[CarrierFigures]:
        return [
            CarrierFigures(one.config.name, one.kind, one.connected, dict(one.counts))
            for one in self._carriers or ()
        ]

    def _listener_figures(self, name: ProtocolName) -> ListenerFigures:
        service = self._services[name]
        listener = self._listeners[name]
        return ListenerFigures(
            protocol=name,
            addresses=listener.addresses,
            tls=listener.tls is not None,
            connections=service.connections,
            max_connections=service.max_connections,
            counters=service.counters(),
            events=self._speakers[name].counters(),
            gauges=getattr(self._speakers[name], "gauges", dict)(),
        )

    def _log_figures(self) -> LogFigures | None:
        if self._log is None:
            return None
        recovery = self._log.recovery._asdict()
        recovery["damage"] = [one._asdict() for one in recovery["damage"]]
        return LogFigures(
            id=self._log.id_text,
            path=self._log.path,
            sync=self._log.sync,
            stats=self._log.stats(),
            full=self._log.full,
            failed=self._log.failed,
            recovery=recovery,
        )


def _answering(board: Switchboard, service: Service) -> Callable[[], asyncio.BaseProtocol]:
    return lambda: board.answer(service)


def _bus_options(config: Config) -> dict[str, Any]:
    return {
        "max_inflight": config.bus.max_inflight,
        "max_deliveries": config.bus.max_deliveries,
        "redelivery_delay": config.bus.redelivery_delay,
        "max_redelivery_delay": config.bus.max_redelivery_delay,
        "dead_letter_prefix": config.bus.dead_letter_prefix,
        "durable_grace": config.bus.durable_grace,
        "max_pending": config.bus.max_pending,
        "hold_for_subscriptions": config.log.hold_for_subscriptions,
    }


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What the loop caught and nobody else did; a peer may cause some of it, such as a TLS handshake that
    fails."""
    message = context.get("message", "")
    log.limited(
        "loop.error",
        key=message,
        level=events.LEVELS["error"],
        message=message,
        exc_info=context.get("exception"),
    )
