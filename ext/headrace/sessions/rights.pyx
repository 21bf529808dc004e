"""Who may publish and subscribe to what: keys and their filters, with the answers kept per topic. It knows nothing of
protocols, nor of how a secret came here."""

from hmac import compare_digest

from libc.stdint cimport uint8_t, uint32_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE

from headrace.trie cimport filter_matches


cdef bint any_matches(list filters, const char* text, Py_ssize_t n) except -1:
    cdef bytes filter
    if n == 0:
        return False
    for filter in filters:
        if filter_matches(PyBytes_AS_STRING(filter), PyBytes_GET_SIZE(filter), text, n):
            return True
    return False


cdef class Rights:
    """What one key may do."""

    def __init__(self, str name not None, publish=(), subscribe=()):
        self.name = name
        self.replace(publish, subscribe)

    def __dealloc__(self):
        free(self.publish_answers)

    def replace(self, publish, subscribe):
        """Other filters from now on, also for those who have the key already."""
        self.publish_filters = [filter.encode() for filter in publish]
        self.subscribe_filters = [filter.encode() for filter in subscribe]
        self.revoked = False
        self._forget()

    def revoke(self):
        """Takes all rights away, also from those who have the key already."""
        self.publish_filters = []
        self.subscribe_filters = []
        self.revoked = True
        self._forget()

    def _forget(self):
        self.changes += 1
        if self.publish_answers != NULL:
            memset(self.publish_answers, 0, self.publish_room)

    cdef bint may_publish(self, uint32_t topic, const char* text, Py_ssize_t n) except -1:
        """`topic` is its id on the bus, or 0 where it has none yet: the answer is then not kept."""
        cdef uint8_t* grown
        cdef uint32_t room
        if topic == 0:
            return any_matches(self.publish_filters, text, n)
        if topic >= self.publish_room:
            room = max(1024, self.publish_room)
            while room <= topic:
                room *= 2
            grown = <uint8_t*>realloc(self.publish_answers, room)
            if grown == NULL:
                raise MemoryError
            memset(grown + self.publish_room, 0, room - self.publish_room)
            self.publish_answers = grown
            self.publish_room = room
        if self.publish_answers[topic] == 0:
            self.publish_answers[topic] = 1 if any_matches(self.publish_filters, text, n) else 2
        return self.publish_answers[topic] == 1

    cdef bint may_subscribe(self, const char* text, Py_ssize_t n) except -1:
        return any_matches(self.subscribe_filters, text, n)


cdef class Keyring:
    """The keys that are valid now. One object for the life of the gateway: a reload replaces what is in it."""

    def __init__(self, keys=()):
        self.rights = {}
        self.secrets = []
        self.replace(keys)

    def replace(self, keys):
        """Takes over a configuration's keys (name, key, publish, subscribe). A name that stays keeps its Rights object, so
        that open sessions have the new filters at once; one that goes is revoked."""
        cdef Rights rights
        old = self.rights
        self.rights = {}
        self.secrets = []
        for key in keys:
            rights = old.pop(key.name, None)
            if rights is None:
                rights = Rights(key.name, key.publish, key.subscribe)
            else:
                rights.replace(key.publish, key.subscribe)
            self.rights[key.name] = rights
            self.secrets.append((key.key.encode(), rights))
        for rights in old.values():
            rights.revoke()

    cdef Rights find(self, bytes secret):
        """Whose secret this is, or None. Looks at every key, each in constant time, so that the time tells nothing."""
        cdef Rights found = None
        for known, rights in self.secrets:
            if compare_digest(known, secret):
                found = rights
        return found

    def lookup(self, bytes secret not None):
        return self.find(secret)
