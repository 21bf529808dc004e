# Relink sessions: endpoints, links and their channels, which outlive connections, and the state of one connection. See
# relink.pyx.

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from headrace.bus cimport Bus, Delivery, Member, Subscription
from headrace.log cimport Message, View
from headrace.sessions.logged cimport LoggedSession
from headrace.sessions.rights cimport Keyring, Rights
from headrace.wake cimport Waker
from headrace.wire.relink cimport Bounds, RawHello, RawPacket

cdef enum:
    BATCH = 1024                # packets that one intent covers


cdef struct Counts:
    uint64_t handshakes
    uint64_t handshakes_refused     # unknown endpoint, other sizes or transactions, bad name, too many links
    uint64_t handshakes_late
    uint64_t links_new
    uint64_t links_resumed
    uint64_t links_refused          # the old link was required and is not known
    uint64_t links_replaced         # a newer connection took the link over
    uint64_t links_ended            # by the shutdown of both
    uint64_t links_expired          # nobody came back within the grace time
    uint64_t links_displaced        # never used, alone, and in the way of new ones
    uint64_t bad_packets            # closed for a value that is not used, or beyond a limit
    uint64_t violations             # closed for something that the protocol does not allow at this place
    uint64_t forbidden              # closed for a channel whose topic the endpoint's key may not publish to
    uint64_t messages               # received
    uint64_t delivered              # sent for the first time
    uint64_t resent                 # sent again after a reconnection
    uint64_t commits
    uint64_t rollbacks
    uint64_t uncommitted            # commits that were refused
    uint64_t dead                   # messages that a peer did not commit, put on their dead-letter topic
    uint64_t unmapped               # messages that have no channel, or that the endpoint's key may not see
    uint64_t lost                   # messages that retention took before they could be sent again
    uint64_t pings
    uint64_t silent                 # closed for not answering a ping
    uint64_t too_large              # closed for messages that no log can carry
    uint64_t refused_full           # closed, or not committed, because the log was full for block_timeout
    uint64_t unconfirmed            # closed because a sync failed: what was received can never be confirmed


cdef struct Sent:                   # a message with a sequence number on a channel
    uint64_t offset
    uint64_t lsn                    # where its record begins

cdef struct Run:                    # messages of one channel, one after another in the log
    uint64_t channel
    uint64_t start                  # sequence number of the first
    uint64_t count

cdef struct Planned:                # a packet of the batch
    RawPacket packet
    Py_ssize_t start                # where it begins in what was received
    Py_ssize_t end


# Channels by id: open addressing over a list that owns them.
cdef class Channels:
    cdef list items
    cdef void** table
    cdef uint32_t room              # a power of two

    cdef object find(self, uint64_t id)
    cdef int add(self, uint64_t id, object channel) except -1
    cdef int remove(self, object channel) except -1
    cdef int rebuild(self, uint32_t room) except -1


cdef class Channel:
    cdef readonly uint64_t id
    cdef bint dirty                 # changed since the last checkpoint of its link


# A channel of the connector: messages come in. All numbers count from the channel's opening and do not wrap.
cdef class InChannel(Channel):
    cdef readonly uint64_t received     # messages that came
    cdef readonly uint64_t resolved     # of these, committed, rolled back or refused; without transactions the same
    cdef uint64_t planned               # messages of this batch that the intent speaks of and that are not done yet
    cdef uint64_t told_received         # what this connection's peer was told
    cdef uint64_t told_consumed
    cdef uint32_t topic                 # where they go; 0: nowhere, `refusal` says why
    cdef str refusal
    cdef bint touched                   # in this batch
    cdef bint doomed                    # more was uncommitted than may be kept: the next commit is refused
    cdef bint partial                   # a commit is half done: the log was full
    cdef uint64_t opened                # number of the first Kept that can have messages of it
    cdef list pending                   # uncommitted: (sequence, Kept, start, end), in order
    cdef list outcomes                  # (one past the last sequence, committed) of runs of commits, ascending


# A channel of the listener: messages go out.
cdef class OutChannel(Channel):
    cdef Sent* ring                     # those with a sequence number that may have to be sent, or sent again
    cdef uint32_t first
    cdef uint32_t count
    cdef uint32_t room                  # a power of two
    cdef readonly uint64_t base         # sequence of the first one in the ring
    cdef uint64_t base_offset           # that one is the channel's first message at or after this offset
    cdef readonly uint64_t sent         # one past the last one that was sent
    cdef readonly uint64_t high         # the same over all connections
    cdef readonly uint64_t received     # one past the last one that the peer has
    cdef readonly uint64_t consumed
    cdef readonly uint64_t commit_sent  # transactions: one past the last one whose commit was sent
    cdef readonly uint64_t answered     # transactions: one past the last one that is committed or given up
    cdef bint closing                   # close was sent
    cdef bint waiting                   # on the link's list of channels with something to send
    cdef bint uncommitted               # on the session's list of channels whose messages are to be committed

    cdef Sent* at(self, uint64_t sequence) noexcept
    cdef int push(self, uint64_t offset, uint64_t lsn) except -1
    cdef void pop(self) noexcept


# Uncommitted messages as one note in the log.
cdef class Kept:
    cdef uint64_t number
    cdef bytes key
    cdef bytes value
    cdef Py_ssize_t left                # messages in it that are neither committed nor rolled back
    cdef uint64_t cost                  # what it takes of the link's max_uncommitted


cdef class Endpoint:
    cdef readonly str name
    cdef readonly uint8_t connector_size
    cdef readonly uint8_t listener_size
    cdef readonly uint8_t flags         # the transactions, as in the handshake
    cdef readonly str publish
    cdef readonly str deliver
    cdef readonly str key               # the name of the key whose rights apply; empty: none do
    cdef bytes publish_before           # what stands before and after the channel in the rules
    cdef bytes publish_after
    cdef bint publish_by_channel
    cdef bytes deliver_before
    cdef bytes deliver_after
    cdef bint deliver_by_channel
    cdef readonly bytes filter          # what it delivers
    cdef uint8_t* known                 # by topic: 0 not asked, 1 has a channel, 2 has none
    cdef uint64_t* channel_of
    cdef uint32_t known_room
    cdef Rights rights                  # None: no key
    cdef uint32_t rights_changes

    cdef uint64_t nature(self) except? 0
    cdef bytes topic_of(self, uint64_t channel)
    cdef bint channel_for(self, Bus bus, uint32_t topic, uint64_t* channel) except -1


cdef class Link(Waker):
    cdef readonly uint64_t id
    cdef Relink shared
    cdef readonly Endpoint endpoint
    cdef RelinkSession session          # the connection that it is on; None
    cdef int64_t alone_since
    cdef bint used                      # its peer sent or acknowledged a message
    cdef Channels ins
    cdef Channels outs
    cdef Subscription subscription
    cdef Member member
    cdef list waiting                   # OutChannels with something to send
    cdef bint recovering                # from before a restart, and not resumed since
    cdef uint64_t floor                 # channels that are not known had nothing below this offset
    # The largest message that it is given; the limit when it began, so that its numbers mean the same after a restart.
    cdef uint64_t max_message
    cdef uint64_t outstanding           # entries of all rings
    cdef bint held                      # the message below was taken and has no place yet
    cdef Sent holding
    cdef uint64_t holding_channel
    cdef bint peer_shut                 # shutdown was received
    cdef bint shut                      # shutdown was sent
    cdef uint64_t next_kept
    cdef uint64_t kept_bytes
    # what the log has
    cdef uint32_t generation            # of the checkpoint
    cdef list changed                   # Channels since the checkpoint, closed ones included
    cdef bint unwritten                 # something changed since the last note
    cdef uint64_t acked                 # acknowledged by the peer since the last note

    cdef int change(self, Channel channel) except -1
    cdef uint8_t flags(self) noexcept
    cdef bytes state(self, list channels)
    cdef uint64_t write(self, Run* runs, uint32_t count, int64_t now) except 0
    cdef uint64_t checkpoint(self, int64_t now) except 0
    cdef int forget(self, int64_t now) except -1
    cdef InChannel open_in(self, uint64_t id)
    cdef int find_topic(self, InChannel channel) except -1
    cdef int settle(self, OutChannel channel) except -1
    cdef int put_out(self, OutChannel channel, uint64_t offset, uint64_t lsn) except -1
    cdef int hold(self, uint64_t channel, uint64_t offset, uint64_t lsn) except -1
    cdef int drop_pending(self, InChannel channel, uint64_t below, int64_t now) except -1
    cdef int drop_kept(self, Kept kept, int64_t now) except -1
    cdef int seek(self) except -1


cdef class Relink:
    cdef readonly Bus bus
    cdef readonly Keyring keys
    cdef readonly uint64_t epoch
    cdef dict endpoints                 # name in UTF-8 -> Endpoint
    cdef dict links                     # id -> Link
    cdef dict unused                    # of these, those without a connection that were never used, oldest first
    cdef dict buried                    # offsets of what was too large for a link and is a dead letter, the newest
    cdef Bounds bounds
    cdef public int64_t handshake_timeout_us    # 0: none
    cdef public int64_t block_timeout_us
    cdef public int64_t ping_interval_us        # 0: never
    cdef public int64_t ping_timeout_us
    cdef public int64_t grace_us
    cdef public uint32_t window         # messages that a channel may have sent and not seen consumed
    cdef public uint32_t max_outstanding    # that a link has in memory over all its channels
    cdef public uint32_t max_channels   # of a link, in each direction
    cdef public uint32_t max_links
    cdef public uint64_t max_uncommitted    # bytes of a link
    cdef int64_t last_sweep
    # What a session needs while it receives, and no longer: one does at a time.
    cdef Planned* batch
    cdef Run* runs                      # of the batch's intent
    cdef uint32_t runs_room
    cdef uint8_t* joined                # a message without its padding
    cdef Py_ssize_t joined_room
    cdef uint32_t* sizes                # of its parts
    cdef uint32_t sizes_room
    cdef Counts counts

    cdef int restore(self, int64_t now) except -1
    cdef Link revive(self, uint64_t id, bytes text, bytes since, int64_t now)
    cdef int redo(self, Link link, list runs, uint64_t done, int64_t now) except -1
    cdef int sweep(self, int64_t now) except -1
    cdef bint room_for_link(self, int64_t now) except -1
    cdef Link new_link(self, Endpoint endpoint, int64_t now)
    cdef int publish_kept(self, Link link, InChannel channel, tuple entry, Message* message, int64_t now) except -100


cdef class RelinkSession(LoggedSession):
    cdef Relink shared
    cdef readonly Link link
    cdef int stage
    cdef bint resuming                  # the link is an old one
    cdef bint may_send                  # messages and operations
    cdef bint stalled                   # the link has as many messages outstanding as it may
    cdef bint note_due                  # this batch has something that is seldom said again and must not be undone by a kill
    cdef Py_ssize_t passed              # room that this delivery spent on messages that the peer does not get
    cdef int64_t began
    cdef int64_t heard                  # when bytes last came
    cdef int64_t pinged                 # 0: no answer is awaited
    cdef uint32_t rights_changes        # Rights.changes when the channels' topics were found
    cdef uint32_t runs_count
    cdef uint64_t left                  # messages that the batch announced and that are not done yet
    cdef uint32_t targets_done          # of the first packet, which was interrupted
    cdef list kept_entries              # of the batch's uncommitted messages
    cdef Py_ssize_t kept_at
    cdef list touched                   # InChannels of this batch
    cdef Py_ssize_t closing_room        # with more of these it is looked which can be forgotten
    cdef dict closing_ids               # channel -> position in the output behind its closed acknowledgement
    cdef list committing                # OutChannels that got messages in this delivery

    cdef int violate(self) except -1
    cdef int forbid(self) except -1
    cdef int promise(self) except -1
    cdef int on_hello(self, RawHello* hello, int64_t now) except -1
    cdef int renotify(self, int64_t now) except -1
    cdef Py_ssize_t receive_packets(self, const uint8_t* data, Py_ssize_t n, int64_t now) except -1
    cdef uint32_t plan(self, uint32_t count, int64_t now) except? 0
    cdef bint has_room(self, uint32_t count) noexcept
    cdef InChannel may_open(self, uint64_t id)
    cdef int add_run(self, uint64_t channel, uint64_t start) except -1
    cdef int forget_plan(self, int64_t now) except -1
    cdef int finish_batch(self, int64_t now) except -1
    cdef int write_note(self, int64_t now) except -1
    cdef int keep_uncommitted(self, uint32_t count, int64_t now) except -1
    cdef int on_packet(self, const RawPacket* packet, int64_t now) except -1
    cdef int on_general(self, uint8_t type, int64_t now) except -1
    cdef int on_message(self, const RawPacket* packet, int64_t now) except -1
    cdef int touch(self, InChannel channel) except -1
    cdef int fill(self, const RawPacket* packet) except -1
    cdef int not_appended(self, int rc, int64_t now) except -1
    cdef int acknowledge(self) except -1
    cdef int acknowledge_one(self, InChannel channel) except -1
    cdef int tell(self, uint8_t type, uint64_t id, uint8_t size, uint64_t before, uint64_t upto) except -1
    cdef int on_operation(self, const RawPacket* packet, uint64_t id, int64_t now) except -1
    cdef int on_commit(self, InChannel channel, uint64_t upto, int64_t now) except -1
    cdef int outcome(self, InChannel channel, uint64_t upto, bint committed) except -1
    cdef bint fits(self, tuple entry) except -1
    cdef int answer(self, InChannel channel, uint64_t upto, bint committed) except -1
    cdef int answer_again(self, InChannel channel, uint64_t upto) except -1
    cdef int on_close(self, InChannel channel, uint64_t id, int64_t now) except -1
    cdef int on_acknowledgement(self, const RawPacket* packet, uint64_t id, int64_t now) except -1
    cdef uint64_t on_uncommitted(self, OutChannel channel, uint64_t upto, int64_t now) except? 0
    cdef int bury(self, const View* view, bytes reason, int64_t now) except -100
    cdef int bury_too_large(self, const View* view, int64_t now) except -100
    cdef bint look(self, const Sent* sent, View* view) noexcept
    cdef int on_resume(self, int64_t now) except -1
    cdef uint64_t lsn_of(self, Delivery* delivery) noexcept
    cdef int send_waiting(self, Py_ssize_t limit, int64_t now) except -1
    cdef int transmit(self, OutChannel channel, View* view) except -1
    cdef int write_view(self, uint64_t id, View* view) except -1
    cdef int place(self, uint64_t id, uint64_t offset, uint64_t lsn, View* view, int64_t now) except -1
    cdef int write_commits(self) except -1
    cdef int close_channel(self, OutChannel channel) except -1
    cdef int consider_shutdown(self, int64_t now) except -1
    cdef int let_go(self, int64_t now) except -1
    cdef int renew_rights(self, int64_t now) except -1
