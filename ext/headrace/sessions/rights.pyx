"""Who may publish and subscribe to what: keys and their filters, with the answers kept per topic. It knows nothing of
protocols, nor of how a secret came here."""

from hmac import compare_digest

from libc.stdint cimport uint8_t, uint32_t
from libc.stdlib cimport free, realloc
from libc.string cimport memset

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE

from headrace.trie cimport filter_matches

cdef enum:
    FIRST_ROOM = 1024           # topics
    YES = 1
    NO = 2


cdef bint any_matches(list filters, const char* text, Py_ssize_t n) except -1:
    cdef bytes filter
    if n == 0:
        return False
    for filter in filters:
        if filter_matches(PyBytes_AS_STRING(filter), PyBytes_GET_SIZE(filter), text, n):
            return True
    return False


cdef bint answer(Answers* answers, list filters, uint32_t topic, const char* text, Py_ssize_t n) except -1:
    cdef uint8_t* grown
    cdef uint32_t room
    if topic == 0:
        return any_matches(filters, text, n)
    if topic >= answers.room:
        room = max(FIRST_ROOM, answers.room)
        while room <= topic:
            room *= 2
        grown = <uint8_t*>realloc(answers.known, room)
        if grown == NULL:
            raise MemoryError
        memset(grown + answers.room, 0, room - answers.room)
        answers.known = grown
        answers.room = room
    if answers.known[topic] == 0:
        answers.known[topic] = YES if any_matches(filters, text, n) else NO
    return answers.known[topic] == YES


cdef bint covers(list wide, list narrow) except -1:
    """Whether the words `wide` match every topic that the words `narrow` match. It may say no where the answer is yes, if
    both have several wildcards next to each other; never the other way round."""
    cdef Py_ssize_t i
    if not wide:
        return not narrow
    if wide[0] == b"#":
        return any([covers(wide[1:], narrow[i:]) for i in range(len(narrow) + 1)])
    if not narrow or narrow[0] == b"#" or (wide[0] != b"*" and wide[0] != narrow[0]):
        return False
    return covers(wide[1:], narrow[1:])


cdef list encoded(filters):
    return [filter.encode() for filter in filters]


cdef class Rights:
    """What one key may do."""

    def __init__(self, str name not None, publish=(), subscribe=()):
        self.name = name
        self.set_filters(encoded(publish), encoded(subscribe))

    def __dealloc__(self):
        free(self.publish_answers.known)
        free(self.subscribe_answers.known)

    cdef int set_filters(self, list publish, list subscribe) except -1:
        """Other filters from now on, also for those who have the key already."""
        self.publish_filters = publish
        self.subscribe_filters = subscribe
        self.changes += 1
        if self.publish_answers.room:
            memset(self.publish_answers.known, 0, self.publish_answers.room)
        if self.subscribe_answers.room:
            memset(self.subscribe_answers.known, 0, self.subscribe_answers.room)
        return 0

    cdef int revoke(self) except -1:
        """Takes all rights away for good, also from those who have the key already."""
        self.revoked = True
        return self.set_filters([], [])

    cdef bint may_publish(self, uint32_t topic, const char* text, Py_ssize_t n) except -1:
        return answer(&self.publish_answers, self.publish_filters, topic, text, n)

    cdef bint may_subscribe(self, uint32_t topic, const char* text, Py_ssize_t n) except -1:
        return answer(&self.subscribe_answers, self.subscribe_filters, topic, text, n)

    cdef bint may_follow(self, bytes filter) except -1:
        """Whether it may subscribe to every topic that a filter matches, now and later."""
        cdef list words = filter.split(b".")
        cdef bytes allowed
        for allowed in self.subscribe_filters:
            if allowed == filter or covers(allowed.split(b"."), words):
                return True
        return False

    def publishes(self, str topic not None):
        """Whether it may publish to this topic."""
        cdef bytes text = topic.encode()
        return self.may_publish(0, PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))

    def subscribes(self, str topic not None):
        """Whether it may subscribe to this topic."""
        cdef bytes text = topic.encode()
        return self.may_subscribe(0, PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))

    def follows(self, str filter not None):
        """Whether it may subscribe to every topic that this filter matches."""
        return self.may_follow(filter.encode())


cdef class Keyring:
    """The keys that are valid now. One object for the life of the gateway: a reload replaces what is in it."""

    def __init__(self, keys=()):
        self.keys = []
        self.replace(keys)

    def replace(self, keys):
        """Takes over a configuration's keys (name, key, publish, subscribe), all of them or, on an error, none.

        A key that stays keeps its Rights object, so that open sessions have the new filters at once. One that goes is
        revoked, and so is one whose secret is another now: who showed the old one has to show the new one.
        """
        cdef Rights rights
        old = {rights.name: (secret, rights) for secret, rights in self.keys}
        plan = []
        for key in keys:
            secret = key.key.encode()
            known, rights = old.get(key.name, (None, None))
            if known != secret:
                rights = Rights(key.name)
            plan.append((secret, rights, encoded(key.publish), encoded(key.subscribe)))
        self.keys = [(secret, rights) for secret, rights, publish, subscribe in plan]
        for secret, rights, publish, subscribe in plan:
            rights.set_filters(publish, subscribe)
        kept = {rights for secret, rights in self.keys}
        for secret, rights in old.values():
            if rights not in kept:
                rights.revoke()

    cdef Rights named(self, str name):
        """The rights of the key with this name, or None."""
        for secret, rights in self.keys:
            if rights.name == name:
                return rights
        return None

    cdef Rights find(self, bytes secret):
        """Whose secret this is, or None. Looks at every key, each in constant time, so that the time tells nothing."""
        cdef Rights found = None
        for known, rights in self.keys:
            if compare_digest(known, secret):
                found = rights
        return found

    def lookup(self, bytes secret not None):
        """Whose secret this is, or None."""
        return self.find(secret)
