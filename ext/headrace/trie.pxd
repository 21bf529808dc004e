# Which filters match a topic, which topics match a filter: the interface of trie.pyx for other compiled
# rooms. It knows names and ids, nothing of subscriptions, records or connections.

cimport cython
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

# Called once for each id that was found. It runs in the middle of a walk: it must not use the tree.
ctypedef void (*Found)(void* ctx, uint32_t id) noexcept

cdef enum:
    # Compiled in, for they give the structs below their shape.
    TOPIC_BYTES = 65535        # what 16 bits can count: the longest name that a protocol can say
    FILTER_BYTES = 1024        # a person writes filters; what is longer is a mistake or an attack
    FILTER_WORDS = 128         # the work that one filter can cause grows with its words
    SET_WIDTH = 3              # 64-bit words for a set of 0..FILTER_WORDS

cdef union Text:
    char near[16]              # a word of up to 16 bytes lies in the node itself
    char* far                  # a longer one in a block that the node owns

cdef struct Node:              # 64 bytes; one word of one or many names. Nodes are numbered; 0 is the root
    uint32_t parent
    uint32_t first             # first child, 0 = none
    uint32_t next              # sibling, 0 = last; in a returned node, the next returned one
    uint32_t prev              # sibling, 0 = first
    uint32_t one               # the child for `*`, 0 = none; also among the siblings (filters only)
    uint32_t many              # the child for `#`, the same
    uint32_t hash              # of parent and word: its place in the index
    uint16_t length            # bytes in the word
    uint8_t kind               # WORD, ONE or MANY
    uint32_t ends              # how many names end here; 0 = only on the way to others
    uint32_t id                # of the topic that ends here (topics only)
    uint64_t seen              # the last step of a match that reached this node (filters only)
    Text text

cdef struct WordTree:
    Node* nodes
    uint32_t room              # nodes allocated
    uint32_t used              # nodes handed out at least once, the root included
    uint32_t returned          # first node to hand out again, 0 = none
    uint32_t live              # nodes in the tree, without the root
    uint32_t* index            # open addressing over (parent, word) -> node, 0 = empty place
    uint32_t places            # length of the index, a power of two
    size_t far                 # bytes in the blocks of long words

cdef struct Pattern:           # a filter from its first wildcard on, taken apart; runs of `#` are one `#`
    uint32_t count             # words
    uint32_t width             # 64-bit words in a set of positions; position `count` means: matched
    const char* words[FILTER_WORDS]
    uint16_t lengths[FILTER_WORDS]
    uint64_t ordinary[SET_WIDTH]      # the positions of each kind, as sets
    uint64_t one[SET_WIDTH]
    uint64_t many[SET_WIDTH]

@cython.final
cdef class Trie:
    cdef WordTree tree
    cdef uint32_t* states      # two lists of nodes for match(), each with room for every node
    cdef uint32_t states_room
    cdef uint64_t step         # counts the words that match() has walked; never repeats
    cdef uint32_t filters      # different filters held

    cpdef uint32_t add(self, bytes filter) except? 0
    cpdef bint remove(self, uint32_t id) except -1
    cdef uint32_t enter(self, uint32_t* states, uint32_t count, uint32_t node) noexcept
    cdef int match(self, const char* topic, Py_ssize_t n, Found found, void* ctx) except -1

@cython.final
cdef class TopicTree:
    cdef WordTree tree
    cdef uint32_t topics

    cpdef object add(self, bytes topic, uint32_t id)
    cpdef object remove(self, bytes topic)
    cdef void report_below(self, uint32_t top, Found found, void* ctx) noexcept
    cdef bint report(
        self, uint32_t node, const Pattern* pattern, const uint64_t* positions, Found found, void* ctx
    ) noexcept
    cdef int visit_open(
        self, uint32_t node, const char* at, const char* end, Found found, void* ctx
    ) except -1
    cdef int visit(self, const char* filter, Py_ssize_t n, Found found, void* ctx) except -1

# One filter against one topic. Neither may be empty; nothing else is asked of them.
cdef bint filter_matches(const char* filter, Py_ssize_t fn, const char* topic, Py_ssize_t tn) noexcept nogil
