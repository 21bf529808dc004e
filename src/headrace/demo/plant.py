"""The demo's plant: devices and services that publish over all five protocols, and subscribers on all five, most of
them in another protocol than the publisher. It knows the gateway's addresses and the clients, and keeps the books."""

import asyncio
import contextlib
import itertools
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from headrace.clients.blipmq import BlipmqClient, Subscription
from headrace.clients.felix import FelixClient
from headrace.clients.felix import Subscription as FelixSubscription
from headrace.clients.overhop import OverhopClient, Worker
from headrace.clients.relink import RelinkConnector
from headrace.clients.zeroctl import Binding, ZeroctlClient
from headrace.demo.books import Reader, Stream, stream_of
from headrace.errors import HeadraceError

KEY: Final = "dev-key"  # of the embedded default
SENSORS: Final = 6
METERS: Final = 3
MACHINES: Final = 3  # that are sent commands
DOORS: Final = 3  # that send events
DESKS: Final = 2  # that ask for reports
WORKERS: Final = 2  # connections, for the queue of jobs
HANDS: Final = 32  # tasks that take jobs from one connection
CREDITS: Final = 64

# What part of all messages is whose.
SHARES: Final = {
    "sensors": 0.40,
    "meters": 0.20,
    "jobs": 0.15,
    "commands": 0.10,
    "events": 0.10,
    "requests": 0.05,
}
MOST_AT_ONCE: Final = 500  # messages of one device, where it has fallen behind
MOST_REQUESTS: Final = 100  # of one desk that are not answered
FORGIVEN_SECONDS: Final = 0.5  # what a device that has fallen behind by more does not send any more

# Of so many jobs one fails at first, always fails, or is for later.
FLAKY_EVERY: Final = 20
BAD_EVERY: Final = 50
LATER_EVERY: Final = 70
ATTEMPTS: Final = 2
RETRY_SECONDS: Final = 0.2
LATER: Final = timedelta(hours=1)

# BlipMQ's subscribers ask; this is their longest pause.
BLIPMQ_POLL_SECONDS: Final = 0.01
# Without any progress for so long, what is missing is taken to be lost.
PATIENCE_SECONDS: Final = 10.0
LOOK_SECONDS: Final = 0.05

CONFIG: Final = """
[[queues]]
name = "work"

[[queues]]
name = "reports"

[[queues]]
name = "billing"
filter = "plant.meter.*"

[[services]]
name = "reports"
key = "service.report.*"
topic = "queue.reports.jobs"

[[endpoints]]
name = "operator"
publish = "plant.command.{channel}"

[[endpoints]]
name = "panel"
deliver = "plant.event.*"
"""

Send = Callable[[int], Awaitable[None]]


class Unanswered(HeadraceError):
    """A service did not finish a request."""


class Plant:
    """Everything that talks to the gateway."""

    def __init__(self, places: dict[str, str], rate: float) -> None:
        self._places = places
        self._rate = rate
        self._background: asyncio.TaskGroup
        self._asking = 0  # requests that are under way
        self.answered = 0  # requests whose requester was told the end
        sensors = Stream("sensors", "blipmq", [f"plant.sensor.{one}" for one in range(SENSORS)])
        meters = Stream("meters", "felix", [f"plant.meter.{one}" for one in range(METERS)])
        jobs = Stream("jobs", "overhop", ["queue.work.jobs"])
        commands = Stream("commands", "relink", [f"plant.command.{one}" for one in range(MACHINES)])
        events = Stream("events", "zeroctl", [f"plant.event.{one}" for one in range(DOORS)])
        requests = Stream("requests", "zeroctl", [f"service.report.{one}" for one in range(DESKS)])
        self.streams = {one.name: one for one in (sensors, meters, jobs, commands, events, requests)}
        self._sensors_zeroctl = sensors.read_by("zeroctl")
        self._sensors_felix = sensors.read_by("felix")
        self._meters_blipmq = meters.read_by("blipmq")
        self._meters_overhop = meters.read_by("overhop", "billing")
        self._jobs = jobs.read_by("overhop", "work")
        self._commands = commands.read_by("blipmq")
        self._events = events.read_by("relink")
        self._requests = requests.read_by("overhop", "reports")

    @property
    def readers(self) -> list[Reader]:
        return [reader for stream in self.streams.values() for reader in stream.readers]

    @property
    def published(self) -> int:
        return sum(stream.published for stream in self.streams.values())

    @property
    def delivered(self) -> int:
        return sum(reader.delivered for reader in self.readers)

    # --- its life -------------------------------------------------------------------------------------------

    async def live(self, stop: asyncio.Event, on_start: Callable[[], None]) -> None:
        """Connects everybody, lets the devices publish until `stop`, then waits until all of it has arrived, or nothing
        more does."""
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as everybody:
            self._background = everybody
            reading = [everybody.create_task(one) for one in await self._open_readers(stack)]
            self._desk = await stack.enter_async_context(OverhopClient(self._places["overhop"]))
            devices = await self._open_devices(stack)
            on_start()
            async with asyncio.TaskGroup() as publishing:
                for share, send in devices:
                    publishing.create_task(paced(stop, self._rate * share, send))
            await self._settle()
            for task in reading:
                task.cancel()

    async def look(self) -> None:
        """Asks the gateway how many jobs its queues hold."""
        for reader in self.readers:
            if reader.queue:
                stats = await self._desk.stats(reader.queue)
                ready = stats["new"] + stats["waiting"] + stats["active"]
                reader.held = ready + stats["delayed"]
                reader.idle = ready == 0 and stats["delayed"] == reader.stream.postponed

    async def _settle(self) -> None:
        loop = asyncio.get_running_loop()
        arrived, since = -1, loop.time()
        while True:
            await self.look()
            if all(reader.settled for reader in self.readers) and not self._asking:
                return
            now = sum(reader.delivered + reader.dead for reader in self.readers) + self.answered
            if now != arrived:
                arrived, since = now, loop.time()
            elif loop.time() - since > PATIENCE_SECONDS:
                return  # the books say what is missing
            await asyncio.sleep(LOOK_SECONDS)

    # --- those who publish ----------------------------------------------------------------------------------

    async def _open_devices(self, stack: AsyncExitStack) -> list[tuple[float, Send]]:
        """What each of them sends with, and its share."""
        found: list[tuple[float, Send]] = []
        for name, kind in (
            ("sensors", self._sensor),
            ("meters", self._meter),
            ("jobs", self._job_maker),
            ("commands", self._operator),
            ("events", self._door),
            ("requests", self._requester),
        ):
            stream = self.streams[name]
            count = len(stream.topics)
            for device in range(count):
                send = await stack.enter_async_context(kind(stream, device))
                found.append((SHARES[name] / count, send))
        return found

    @asynccontextmanager
    async def _sensor(self, stream: Stream, device: int) -> AsyncIterator[Send]:
        topic, values = stream.topics[device], readings(20, 90)
        async with BlipmqClient(self._places["blipmq"], key=KEY) as client:

            async def send(count: int) -> None:
                payloads = [stream.payload(device, celsius=next(values)) for _ in range(count)]
                await client.publish_many(topic, payloads, qos=1)
                stream.published += count

            yield send

    @asynccontextmanager
    async def _meter(self, stream: Stream, device: int) -> AsyncIterator[Send]:
        tenant, namespace, name = stream.topics[device].split(".")
        values = readings(200, 400)
        async with FelixClient(self._places["felix"]) as client:

            async def send(count: int) -> None:
                payloads = [stream.payload(device, watts=next(values)) for _ in range(count)]
                await client.publish_batch(tenant, namespace, name, payloads)
                stream.published += count

            yield send

    @asynccontextmanager
    async def _job_maker(self, stream: Stream, device: int) -> AsyncIterator[Send]:
        numbers = itertools.count(1)
        async with OverhopClient(self._places["overhop"]) as client:

            async def enqueue() -> None:
                fate = fate_of(next(numbers))
                await client.enqueue(
                    "work",
                    stream.payload(device, fate=fate),
                    scheduled_at=datetime.now(UTC) + LATER if fate == "later" else None,
                    max_attempts=ATTEMPTS,
                    retry_interval=RETRY_SECONDS,
                )
                stream.published += 1
                stream.postponed += fate == "later"

            async def send(count: int) -> None:
                await asyncio.gather(*(enqueue() for _ in range(count)))

            yield send

    @asynccontextmanager
    async def _operator(self, stream: Stream, device: int) -> AsyncIterator[Send]:
        async with RelinkConnector(self._places["relink"], endpoint="operator") as link:
            channel = link.channel(device)

            async def send(count: int) -> None:
                for _ in range(count):
                    await channel.send(stream.payload(device, speed=random.randint(0, 100)))
                await channel.flush()
                stream.published += count

            yield send

    @asynccontextmanager
    async def _door(self, stream: Stream, device: int) -> AsyncIterator[Send]:
        async with self._node(f"door-{device}") as client:

            async def send(count: int) -> None:
                payloads = [stream.payload(device, open=random.random() < 0.5) for _ in range(count)]
                await client.publish_many(stream.topics[device], payloads)
                stream.published += count

            yield send

    @asynccontextmanager
    async def _requester(self, stream: Stream, device: int) -> AsyncIterator[Send]:
        room = asyncio.Semaphore(MOST_REQUESTS)
        async with self._node(f"desk-{device}") as client:

            async def request() -> None:
                try:
                    task = await client.request(stream.topics[device], stream.payload(device))
                    stream.published += 1
                    async with asyncio.timeout(PATIENCE_SECONDS):
                        await task.finished()
                    self.answered += 1
                except TimeoutError as error:
                    if isinstance(error, HeadraceError):
                        raise
                    raise Unanswered(f"a request was not finished within {PATIENCE_SECONDS:g} s") from None
                finally:
                    self._asking -= 1
                    room.release()

            async def send(count: int) -> None:
                for _ in range(count):
                    await room.acquire()
                    self._asking += 1
                    self._background.create_task(request())

            yield send

    def _node(self, name: str) -> ZeroctlClient:
        return ZeroctlClient(self._places["zeroctl"], key=KEY, node=name)

    # --- those who subscribe --------------------------------------------------------------------------------

    async def _open_readers(self, stack: AsyncExitStack) -> list[Coroutine[Any, Any, None]]:
        """What each of them does from now on."""
        reading: list[Coroutine[Any, Any, None]] = []
        history = await stack.enter_async_context(self._node("history"))
        sensors = await stack.enter_async_context(history.bind("plant.sensor.*", acknowledge=True))
        reading.append(read_zeroctl(sensors, self._sensors_zeroctl))
        letters = await stack.enter_async_context(history.bind("dead.#", acknowledge=True))
        reading.append(self._read_dead_letters(letters))

        dashboard = await stack.enter_async_context(FelixClient(self._places["felix"]))
        for topic in self.streams["sensors"].topics:
            events = await stack.enter_async_context(dashboard.subscribe(*topic.split(".")))
            reading.append(read_felix(events, self._sensors_felix))

        for reader in (self._meters_blipmq, self._commands):
            client = await stack.enter_async_context(BlipmqClient(self._places["blipmq"], key=KEY))
            for topic in reader.stream.topics:
                wish = client.subscribe(topic, qos=1, auto_ack=True, max_wait=BLIPMQ_POLL_SECONDS)
                reading.append(read_blipmq(await stack.enter_async_context(wish), reader))

        panel = RelinkConnector(self._places["relink"], endpoint="panel")
        await stack.enter_async_context(panel)
        reading.append(read_relink(panel, self._events))

        for reader, workers in ((self._meters_overhop, 1), (self._jobs, WORKERS), (self._requests, 1)):
            for _ in range(workers):
                at_work = await stack.enter_async_context(OverhopClient(self._places["overhop"]))
                worker = await stack.enter_async_context(at_work.work(reader.queue, credits=CREDITS))
                reading += [work(worker, reader) for _ in range(HANDS)]
        return reading

    async def _read_dead_letters(self, letters: Binding) -> None:
        async for letter in letters:
            for reader in self.streams[stream_of(letter.body)].readers:
                if reader.queue:
                    reader.bury(letter.body)


async def paced(stop: asyncio.Event, rate: float, send: Send) -> None:
    """Sends so many messages a second, as many at a time as are due."""
    loop = asyncio.get_running_loop()
    begin = loop.time() + random.random() / rate  # not all devices at once
    sent = 0
    while not stop.is_set():
        begin = max(begin, loop.time() - FORGIVEN_SECONDS - sent / rate)
        due = int((loop.time() - begin) * rate) + 1 - sent
        if due > 0:
            count = min(due, MOST_AT_ONCE)
            await send(count)
            sent += count
        pause = begin + sent / rate - loop.time()
        if pause > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await stop.wait()


def fate_of(number: int) -> str:
    """What becomes of a job. Each fate comes early, and no job has two."""
    if number % LATER_EVERY == 7:
        return "later"
    if number % BAD_EVERY == 5:
        return "bad"
    return "flaky" if number % FLAKY_EVERY == 2 else "good"


def readings(low: float, high: float) -> Iterator[float]:
    """What an instrument shows, which wanders."""
    value = (low + high) / 2
    while True:
        value = min(high, max(low, value + random.gauss(0, (high - low) / 50)))
        yield round(value, 2)


async def read_zeroctl(messages: Binding, reader: Reader) -> None:
    async for message in messages:
        reader.time(message.body)
        reader.count(message.body)


async def read_felix(events: FelixSubscription, reader: Reader) -> None:
    async for payload in events:
        reader.time(payload)
        reader.count(payload)


async def read_blipmq(messages: Subscription, reader: Reader) -> None:
    async for message in messages:
        reader.time(message.payload)
        reader.count(message.payload)


async def read_relink(link: RelinkConnector, reader: Reader) -> None:
    async for message in link:
        reader.time(message.payload)
        reader.count(message.payload)


async def work(worker: Worker, reader: Reader) -> None:
    """Does a queue's jobs: some fail, once or always, as they say themselves."""
    async for job in worker:
        payload: bytes = job.payload
        if job.attempt == 1:
            reader.time(payload)
        else:
            reader.again += 1
        fate = json.loads(payload).get("fate")
        if fate == "bad" or (fate == "flaky" and job.attempt == 1):
            await job.fail("no such part in stock")
        else:
            await job.done()
            reader.count(payload)
