"""Queues of jobs on the bus: a queue is a durable queue subscription bound to a filter. What it is stands in a note in the
log, where it stands is the subscription's own. It knows nothing of the wire, nor of who works.

A job's id is made from the log's id and the message's offset, so there is no table of jobs: whatever any protocol publishes
to a topic that the filter matches has one.
"""

import json
import uuid

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp

from headrace.bus cimport OVERHOP, Bus, Subscription

from headrace.errors import BusError, HeadraceError, LogError
from headrace.limits import OVERHOP_QUEUE_ACTIVE, OVERHOP_QUEUE_NAME_BYTES, OVERHOP_QUEUE_OPEN
from headrace.trie import matches

cdef bytes NOTE = b"queue."
SYSTEM_QUEUE = "_system"


class QueueError(HeadraceError):
    """A queue cannot be made or changed as it was asked for."""


class DuplicateQueue(QueueError):
    """There is one of this name."""


class BadQueueName(QueueError):
    """No queue may have this name."""


class TooManyQueues(QueueError):
    """There are as many as there may be."""


def check_name(str name not None):
    """Raises BadQueueName for what is no name of a queue: a letter or a digit, then also _ and -."""
    if not name.isascii() or not name[:1].isalnum() or not name.replace("_", "a").replace("-", "a").isalnum():
        raise BadQueueName(f"a queue's name has letters, digits, _ and -, and begins with one of the first two, not {name!r:.80}")
    if len(name) > OVERHOP_QUEUE_NAME_BYTES:
        raise BadQueueName(f"a queue's name has at most {OVERHOP_QUEUE_NAME_BYTES} characters, not {len(name)}")


def filter_for(str name not None):
    """What a queue takes unless it is told otherwise, by the protocol's own rule."""
    return f"queue.{name}.#"


def topic_for(str name not None):
    """Where jobs are put that are given to a queue by its name, by the protocol's own rule."""
    return f"queue.{name}.jobs"


cdef class Queue:
    """One queue. Made by Queues.add()."""

    cdef bint system(self) noexcept:
        return PyBytes_AS_STRING(self.label)[0] == c"_"

    @property
    def state(self):
        return "paused" if self.paused else "running"

    def counts(self, now):
        """How many jobs are in each state."""
        return self.subscription.census(now)

    @property
    def workers(self):
        """How many work for it."""
        return self.subscription.member_count


cdef class Queues:
    """All queues of a gateway: those of before the last restart, those of the configuration, and those made since.

    `deadline` is how many seconds a worker may have a job, `keep_finished` of how many finished jobs of a queue it is
    remembered what became of them, `most` how many queues there may be. With a `map` (a headrace.mapping.Map of names) jobs
    go to the topic that it has for the queue's name, which is also what a queue takes unless it is told otherwise.
    """

    def __init__(self, Bus bus not None, *, double deadline=60.0, uint32_t keep_finished=1000, uint32_t most=10_000,
                 map=None, now=None):
        self.bus = bus
        self.map = map
        self.by_label = {}
        self.most = most
        self.deadline_us = <int64_t>(deadline * 1e6)
        self.keep_finished = keep_finished
        for i in range(8):
            self.mark[i] = bus.log.id[i]
        self.mark[6] = 0x80 | (self.mark[6] & 0x0F)      # a UUID of version 8: its bits are its maker's
        self._restore(now)
        if self.get(SYSTEM_QUEUE) is None:
            self._make(SYSTEM_QUEUE, filter_for(SYSTEM_QUEUE), topic_for(SYSTEM_QUEUE), None, True, now)

    def _restore(self, now):
        cdef Subscription subscription
        known = {
            subscription.owner: subscription for subscription in self.bus.subscriptions.values()
            if subscription.protocol == OVERHOP and subscription.queue
        }
        for key, value in self.bus.notes(NOTE).items():
            told = json.loads(value)
            name = key[len(NOTE):].decode()
            subscription = known.pop(name, None)
            self._take(name, told, subscription, now)
        for subscription in known.values():               # of a queue whose making or end was cut short
            self.bus.unsubscribe(subscription, now)

    def _take(self, name, told, subscription, now):
        """A queue as the log tells it."""
        cdef Queue queue = Queue()
        queue.name = name
        queue.label = name.encode()
        queue.id = told["id"]
        queue.filter = told["filter"]
        queue.concurrency_limit = told["concurrency_limit"]
        queue.allow_job_overrides = told["allow_job_overrides"]
        queue.paused = told["paused"]
        queue.topic_name = told.get("topic", topic_for(name)).encode()
        # The topic first: where it cannot be made there is no subscription that nobody knows of.
        queue.topic = self.bus.topic_id(PyBytes_AS_STRING(queue.topic_name), PyBytes_GET_SIZE(queue.topic_name))
        if subscription is None:
            subscription = self._subscribe(queue, now)
        queue.subscription = subscription
        self._set_limits(queue)
        self.by_label[queue.label] = queue
        return queue

    def _subscribe(self, Queue queue, now):
        return self.bus.subscribe(
            queue.filter, at_least_once=True, durable=True, queue=True, confirm_all=True, owner=queue.name, protocol=OVERHOP,
            max_inflight=OVERHOP_QUEUE_OPEN, max_active=self._active(queue), deadline_us=self.deadline_us,
            keep_finished=self.keep_finished, now=now)

    def _active(self, Queue queue):
        limit = queue.concurrency_limit
        return OVERHOP_QUEUE_ACTIVE if limit is None else min(limit, OVERHOP_QUEUE_ACTIVE)

    def _set_limits(self, Queue queue):
        queue.subscription.max_active = self._active(queue)
        queue.subscription.deadline_us = self.deadline_us
        queue.subscription.keep_finished = self.keep_finished
        queue.subscription.pause(queue.paused)
        queue.subscription.on_finished = self.on_finished

    def report_to(self, on_finished):
        """Has a callable told of every job that is completed or given up: its protocol, flags and headers, and whether
        it was completed."""
        cdef Queue queue
        self.on_finished = on_finished
        for queue in self.by_label.values():
            queue.subscription.on_finished = on_finished

    def takes(self, str topic not None):
        """Whether what is published to a topic is a job of some queue."""
        cdef Queue queue
        return any([matches(queue.filter, topic) for queue in self.by_label.values()])

    def topic_for(self, str name not None):
        """Where jobs are put that are given to a queue of this name; BadQueueName if the map has no topic for it."""
        if self.map is None:
            return topic_for(name)
        topic = self.map.topic(name.encode())
        if topic is None:
            raise BadQueueName(self.map.refusal(name.encode()))
        return topic.decode()

    def filter_for(self, str name not None):
        """What a queue of this name takes unless it is told otherwise."""
        return filter_for(name) if self.map is None else self.topic_for(name)

    def _make(self, name, filter, topic, concurrency_limit, allow_job_overrides, now):
        told = {
            "id": str(uuid.uuid4()), "filter": filter, "topic": topic, "concurrency_limit": concurrency_limit,
            "allow_job_overrides": allow_job_overrides, "paused": False,
        }
        # The note first: a subscription without one is taken for what was left of a queue that is gone.
        self.bus.note(NOTE + name.encode(), json.dumps(told).encode(), now)
        try:
            return self._take(name, told, None, now)
        except (BusError, LogError):
            self.bus.forget(NOTE + name.encode(), now)
            raise

    def _write(self, Queue queue, paused, now):
        told = {
            "id": queue.id, "filter": queue.filter, "topic": queue.topic_name.decode(),
            "concurrency_limit": queue.concurrency_limit, "allow_job_overrides": queue.allow_job_overrides,
            "paused": paused,
        }
        self.bus.note(NOTE + queue.label, json.dumps(told).encode(), now)

    def configure(self, str name not None, str filter, concurrency_limit, allow_job_overrides, now=None):
        """A queue of the configuration: made if it is not there, and otherwise as it is told now."""
        cdef Queue queue = self.get(name)
        filter = filter or self.filter_for(name)
        if queue is None:
            return self.add(name, filter=filter, concurrency_limit=concurrency_limit,
                            allow_job_overrides=allow_job_overrides, now=now)
        if queue.filter != filter:
            raise QueueError(
                f"the queue {name!r} is bound to {queue.filter!r} and has its place in the log; remove it before it can be"
                f" bound to {filter!r}")
        if (queue.concurrency_limit, bool(queue.allow_job_overrides)) != (concurrency_limit, bool(allow_job_overrides)):
            queue.concurrency_limit = concurrency_limit
            queue.allow_job_overrides = allow_job_overrides
            self._write(queue, queue.paused, now)
            self._set_limits(queue)
        return queue

    def add(self, str name not None, *, str filter=None, concurrency_limit=None, bint allow_job_overrides=True, now=None):
        """Makes a queue: jobs are what is published from now on. DuplicateQueue, BadQueueName, TooManyQueues, LogError."""
        if self.get(name) is not None:
            raise DuplicateQueue(f"there is a queue {name!r}")
        check_name(name)
        if <uint32_t>len(self.by_label) >= self.most:
            raise TooManyQueues(f"there are {self.most} queues, which is the limit")
        return self._make(
            name, filter or self.filter_for(name), self.topic_for(name), concurrency_limit, allow_job_overrides, now)

    def remove(self, Queue queue not None, now=None):
        """Ends a queue; its jobs stay messages in the log."""
        self.bus.forget(NOTE + queue.label, now)
        self.bus.unsubscribe(queue.subscription, now)
        queue.gone = True
        del self.by_label[queue.label]

    def set_paused(self, Queue queue not None, bint paused, now=None):
        """Holds a queue's jobs back, or lets them go on."""
        self._write(queue, paused, now)
        queue.paused = paused
        queue.subscription.pause(paused)

    def get(self, str name not None):
        """The queue of this name, or None."""
        return self.by_label.get(name.encode())

    def __iter__(self):
        return iter([self.by_label[label] for label in sorted(self.by_label)])

    def __len__(self):
        return len(self.by_label)

    cdef Queue find(self, const uint8_t* name, Py_ssize_t n):
        return self.by_label.get(PyBytes_FromStringAndSize(<const char*>name, n))

    cdef void job_uuid(self, uint64_t offset, uint8_t* out) noexcept nogil:
        cdef int i
        for i in range(8):
            out[i] = self.mark[i]
            out[15 - i] = <uint8_t>(offset >> (8 * i))
        out[8] = 0x80 | (out[8] & 0x3F)

    cdef bint job_offset(self, const uint8_t* uuid, uint64_t* offset) noexcept nogil:
        """Whether this is the id of a message of this log."""
        cdef int i
        if memcmp(uuid, self.mark, 8) != 0 or uuid[8] & 0xC0 != 0x80:
            return False
        offset[0] = uuid[8] & 0x3F
        for i in range(9, 16):
            offset[0] = offset[0] << 8 | uuid[i]
        return True
