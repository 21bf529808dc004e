# zeroctl sessions on our own carrier: what they share, and the state of one. See zeroctl.pyx.

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from headrace.bus cimport Bus, Delivery, Member, Subscription
from headrace.sessions.logged cimport LoggedSession
from headrace.sessions.rights cimport Keyring, Rights
from headrace.wake cimport Waker
from headrace.wire.bytes cimport View
from headrace.wire.zeroctl cimport RawBind, RawFrame, RawHeader, RawMessage


cdef struct Counts:
    uint64_t opened                 # connections that were welcomed
    uint64_t anonymous              # of these, those without a key
    uint64_t bound
    uint64_t unbound
    uint64_t acks                   # deliveries acknowledged
    uint64_t rejects                # deliveries given back
    uint64_t pings
    uint64_t confirmed              # messages whose sender was told that they are safe
    uint64_t hashed_off_loop        # bodies whose sha256 was computed in a thread
    uint64_t bad_frames             # closed for a length or a type
    uint64_t handshakes_late        # closed for not opening in time
    uint64_t silent                 # closed because nothing came, not even an answer to PING
    uint64_t refused_400
    uint64_t refused_401
    uint64_t refused_403
    uint64_t refused_404
    uint64_t refused_409
    uint64_t refused_410
    uint64_t refused_413
    uint64_t refused_422
    uint64_t refused_426
    uint64_t refused_503
    uint64_t return_paths_refused   # of those with 403: requests whose answers would go where their sender may not publish
    uint64_t bad_digest             # of those with 422: sha256 was not the body's
    uint64_t dropped_full           # unconfirmed messages dropped: the log was full for block_timeout, or had failed
    uint64_t refused_full           # confirmed ones refused for the same reasons
    uint64_t filtered               # deliveries that a binding's conditions held back
    uint64_t no_counterpart         # messages whose topic is no routing key
    uint64_t too_large              # messages that the framing or the log cannot carry
    uint64_t foreign                # deliveries that got a header here, because another protocol sent them
    uint64_t expired                # queues that ended because they had no member for durable_grace
    uint64_t unconfirmed            # closed because a sync failed: what was published can never be confirmed


cdef class Zeroctl:
    """What all zeroctl sessions of a gateway share."""
    cdef readonly Bus bus
    cdef readonly Keyring keys
    cdef readonly uint32_t max_header
    cdef readonly uint32_t max_body
    cdef readonly uint32_t max_length
    cdef readonly str node_name
    cdef readonly str node_uuid
    cdef public str anonymous                   # the name of the key whose rights a peer without one has; empty: none
    cdef public int64_t handshake_timeout_us    # 0: none
    cdef public int64_t block_timeout_us
    cdef public int64_t keepalive_us            # a peer that is silent for so long is asked; 0: never
    cdef public uint32_t max_bindings           # of one connection
    cdef public Py_ssize_t hash_inline          # larger bodies are hashed by hash_later
    cdef public object hash_later               # called with a body and who is to be told its digest; None: nobody is
    cdef public object registry                 # has knows(node-uuid); None: every node counts as known
    cdef public object verifier                 # called with header and body: why the signature is none, or an empty text
    cdef Rights signing                         # its publish filters are the topics that need a signature
    cdef Rights served                          # and here those that the gateway's own services take requests from
    cdef dict groups                            # (owner, filter) -> Subscription, of those that have a name
    cdef int64_t next_look                      # when queues without members are looked at again
    cdef dict foreign_headers                   # offset -> header, of what another protocol sent
    cdef public object map                      # headrace.mapping.Map of keys; None: they are the bus's topics
    cdef dict keys_of                           # topic id -> key as peers write it, or None; filled where there is a map
    cdef Counts counts

    cdef bytes key_of(self, uint32_t topic)
    cdef bytes foreign_header(self, Delivery* delivery)
    cdef Subscription group(self, tuple identity)
    cdef int expire(self, int64_t now) except -1


cdef class Binding(Waker):
    """One BIND of one connection."""
    cdef ZeroctlSession session
    cdef readonly uint32_t number               # as its peer calls it
    cdef Member member
    cdef bytes conditions                       # as in the frame
    cdef uint8_t condition_count
    cdef bint due                               # on the session's list

    cdef bint holds(self, const uint8_t* header, Py_ssize_t n) noexcept


cdef class ZeroctlSession(LoggedSession):
    cdef Zeroctl shared
    cdef Rights rights                  # of the key that opened; None before
    cdef str node                       # what the peer calls itself, or empty
    cdef str uuid
    cdef dict bindings                  # number -> Binding
    cdef object due                     # deque of bindings that may have something
    cdef uint64_t run_id                # the last message that waits for its CONFIRM to be written
    cdef uint32_t run_count             # how many before it have consecutive ids, itself included; 0: none waits
    cdef int64_t began                  # when the session was first told the time
    cdef int64_t heard                  # when it last received something
    cdef int64_t pinged                 # when it last asked whether the peer is there; 0: since then it was heard
    cdef bint hashing                   # a thread computes the digest of the first frame's body
    cdef bytes digest                   # which it has done
    cdef uint32_t memo_topic            # the last key published to: allowed, known to the bus. 0: none
    cdef bint memo_signed               # it needs a signature
    cdef bint memo_served               # a service of the gateway takes what is published there
    cdef uint32_t rights_changes        # Rights.changes when what is remembered here was found out
    cdef uint8_t memo_size
    cdef uint8_t memo[256]
    cdef bytes scratch                  # room for a rewritten header

    cdef int on_frame(self, RawFrame* frame, int64_t now) except -1
    cdef int on_open(self, RawFrame* frame, int64_t now) except -1
    cdef int on_message(self, RawFrame* frame, int64_t now) except -1
    cdef int find_key(self, RawFrame* frame, RawMessage* message) except -1
    cdef str wrong_path(self, View path)
    cdef int check_body(self, RawMessage* message, RawHeader* header) except -1
    cdef int on_bind(self, RawFrame* frame, int64_t now) except -1
    cdef int bind(self, RawFrame* frame, RawBind* wish, bytes filter, int64_t now) except -1
    cdef int on_unbind(self, RawFrame* frame, int64_t now) except -1
    cdef int on_ack(self, RawFrame* frame, int64_t now) except -1
    cdef int on_reject(self, RawFrame* frame, int64_t now) except -1
    cdef int on_credit(self, RawFrame* frame, int64_t now) except -1
    cdef int renew_rights(self, int64_t now) except -1
    cdef int end_binding(self, Binding binding, int64_t now) except -1
    cdef int make_due(self, Binding binding) except -1
    cdef int put_delivery(self, Binding binding, Delivery* delivery, int64_t now) except -1
    cdef int pass_by(self, Binding binding, uint64_t tag, bint confirm) except -1
    cdef uint8_t* room_for(self, Py_ssize_t n) except NULL
    cdef int not_appended(self, int rc, bint confirm, uint64_t id, int64_t now) except -1
    cdef int say_confirmed(self) except -1
    cdef int done(self, uint64_t id) except -1
    cdef int refuse(self, uint64_t id, uint16_t code, str text) except -1
