"""Which filters match a topic, and which topics match a filter.

A name is words with dots between them; a word may be empty. In a filter the word `*` stands for exactly one
word and the word `#` for any number of them, none included. Names are bytes here and ids are numbers: nothing
in this file knows of subscriptions, records or connections.
"""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memchr, memcmp, memcpy, memset

import os

cimport cython


cdef extern from *:
    """
    #define HR_P61 ((1ULL << 61) - 1)

    /* A word as the coefficients of a polynomial modulo 2^61 - 1, at a point that a peer cannot know: two
       words of n bytes have the same key with a chance of about n / 2^63, so nobody can choose names that
       collide. */
    static inline uint64_t hr_word_key(const char *word, size_t n, uint64_t point)
    {
        uint64_t key = n, chunk;
        while (n) {
            size_t part = n < 7 ? n : 7;
            chunk = 0;
            memcpy(&chunk, word, part);
            unsigned __int128 product = (unsigned __int128)(key + chunk) * point;
            key = (uint64_t)(product & HR_P61) + (uint64_t)(product >> 61);
            key = (key & HR_P61) + (key >> 61);
            word += part;
            n -= part;
        }
        return key;
    }

    static inline uint32_t hr_place(uint64_t key, uint32_t parent)
    {
        uint64_t x = key + parent * 0x9E3779B97F4A7C15ULL;
        x ^= x >> 32;
        x *= 0xD6E8FEB86659FD93ULL;
        return (uint32_t)(x >> 32);
    }

    #define hr_lowest_bit(x) __builtin_ctzll(x)
    """
    uint64_t hr_word_key(const char* word, size_t n, uint64_t point) noexcept nogil
    uint32_t hr_place(uint64_t key, uint32_t parent) noexcept nogil
    int hr_lowest_bit(uint64_t x) noexcept nogil


cdef enum:
    WORD = 0                   # an ordinary word
    ONE = 1                    # `*`
    MANY = 2                   # `#`

cdef uint64_t POINT = int.from_bytes(os.urandom(8), "little") % (2**61 - 3) + 2


# ---- words ----

cdef inline size_t word_length(const char* at, const char* end) noexcept nogil:
    cdef const char* dot = <const char*> memchr(at, c".", end - at) if at < end else NULL
    return (dot if dot != NULL else end) - at


cdef inline int word_kind(const char* word, size_t n) noexcept nogil:
    if n == 1:
        if word[0] == c"*":
            return ONE
        if word[0] == c"#":
            return MANY
    return WORD


cdef bint filter_matches(const char* filter, Py_ssize_t fn, const char* topic, Py_ssize_t tn) noexcept nogil:
    # Only the last `#` is ever tried again: what comes before it already fits in the fewest words, and taking
    # more could not help what comes after. So the cost is words times words at worst. A cursor that is past
    # its end by one says that no word is left.
    cdef const char* f = filter
    cdef const char* f_end = filter + fn
    cdef const char* t = topic
    cdef const char* t_end = topic + tn
    cdef const char* retry_f = NULL
    cdef const char* retry_t = NULL
    cdef size_t f_n
    cdef size_t t_n
    cdef int kind
    while t <= t_end:
        t_n = word_length(t, t_end)
        if f <= f_end:
            f_n = word_length(f, f_end)
            kind = word_kind(f, f_n)
            if kind == MANY:
                f += f_n + 1
                retry_f = f
                retry_t = t
                continue
            if kind == ONE or (f_n == t_n and memcmp(f, t, t_n) == 0):
                f += f_n + 1
                t += t_n + 1
                continue
        if retry_f == NULL:
            return False
        if retry_f > f_end:
            return True
        retry_t += word_length(retry_t, t_end) + 1
        f = retry_f
        t = retry_t
    while f <= f_end:
        f_n = word_length(f, f_end)
        if word_kind(f, f_n) != MANY:
            return False
        f += f_n + 1
    return True


# ---- a tree of words ----

cdef int tree_open(WordTree* tree) noexcept nogil:
    tree.nodes = <Node*> calloc(16, sizeof(Node))
    tree.index = <uint32_t*> calloc(32, sizeof(uint32_t))
    if tree.nodes == NULL or tree.index == NULL:
        return -1
    tree.room = 16
    tree.places = 32
    tree.used = 1
    return 0


cdef void tree_close(WordTree* tree) noexcept nogil:
    cdef uint32_t i
    for i in range(1, tree.used):
        if tree.nodes[i].length > sizeof(Text):
            free(tree.nodes[i].text.far)
    free(tree.nodes)
    free(tree.index)


cdef size_t tree_bytes(const WordTree* tree) noexcept nogil:
    return tree.room * sizeof(Node) + tree.places * sizeof(uint32_t) + tree.far


cdef inline const char* node_text(const Node* node) noexcept nogil:
    if node.length > sizeof(Text):
        return node.text.far
    return node.text.near


cdef inline uint32_t tree_child(
    const WordTree* tree, uint32_t parent, uint64_t key, const char* word, size_t n
) noexcept nogil:
    # The child of `parent` for an ordinary word, 0 if there is none.
    cdef uint32_t hash = hr_place(key, parent)
    cdef uint32_t mask = tree.places - 1
    cdef uint32_t place = hash & mask
    cdef uint32_t child = tree.index[place]
    cdef const Node* node
    while child != 0:
        node = &tree.nodes[child]
        if (
            node.hash == hash and node.parent == parent and node.length == n
            and memcmp(node_text(node), word, n) == 0
        ):
            return child
        place = (place + 1) & mask
        child = tree.index[place]
    return 0


cdef inline void index_put(uint32_t* index, uint32_t mask, uint32_t hash, uint32_t child) noexcept nogil:
    cdef uint32_t place = hash & mask
    while index[place] != 0:
        place = (place + 1) & mask
    index[place] = child


cdef void index_drop(WordTree* tree, uint32_t child) noexcept nogil:
    # Moves what follows into the gap, so that no search stops early and no tombstones gather.
    cdef uint32_t mask = tree.places - 1
    cdef uint32_t gap = tree.nodes[child].hash & mask
    cdef uint32_t place
    cdef uint32_t home
    while tree.index[gap] != child:
        gap = (gap + 1) & mask
    place = gap
    while True:
        place = (place + 1) & mask
        if tree.index[place] == 0:
            break
        home = tree.nodes[tree.index[place]].hash & mask
        if ((place - home) & mask) >= ((place - gap) & mask):
            tree.index[gap] = tree.index[place]
            gap = place
    tree.index[gap] = 0


cdef int tree_make_room(WordTree* tree) noexcept nogil:
    # Room for one more node, in the list and in the index.
    cdef uint32_t room
    cdef uint32_t i
    cdef Node* nodes
    cdef uint32_t* index
    if tree.returned == 0 and tree.used == tree.room:
        if tree.room > 0x7FFFFFFF:
            return -1
        room = tree.room + tree.room // 2
        nodes = <Node*> realloc(tree.nodes, room * sizeof(Node))
        if nodes == NULL:
            return -1
        tree.nodes = nodes
        tree.room = room
    if tree.live + 1 > tree.places // 4 * 3:
        index = <uint32_t*> calloc(<size_t> tree.places * 2, sizeof(uint32_t))
        if index == NULL:
            return -1
        for i in range(tree.places):
            if tree.index[i] != 0:
                index_put(index, tree.places * 2 - 1, tree.nodes[tree.index[i]].hash, tree.index[i])
        free(tree.index)
        tree.index = index
        tree.places *= 2
    return 0


cdef uint32_t tree_grow(WordTree* tree, uint32_t parent, const char* word, size_t n, int kind) noexcept nogil:
    # The child of `parent` for this word, made if need be; 0 if memory ran out.
    cdef uint64_t key = hr_word_key(word, n, POINT)
    cdef uint32_t child
    cdef Node* node
    cdef char* far = NULL
    if kind == ONE:
        child = tree.nodes[parent].one
    elif kind == MANY:
        child = tree.nodes[parent].many
    else:
        child = tree_child(tree, parent, key, word, n)
    if child != 0:
        return child
    if tree_make_room(tree) < 0:
        return 0
    if n > sizeof(Text):
        far = <char*> malloc(n)
        if far == NULL:
            return 0
    if tree.returned != 0:
        child = tree.returned
        tree.returned = tree.nodes[child].next
    else:
        child = tree.used
        tree.used += 1
    node = &tree.nodes[child]
    memset(node, 0, sizeof(Node))
    node.length = <uint16_t> n
    node.kind = <uint8_t> kind
    node.parent = parent
    node.next = tree.nodes[parent].first
    if far != NULL:
        memcpy(far, word, n)
        node.text.far = far
        tree.far += n
    else:
        memcpy(node.text.near, word, n)
    if node.next != 0:
        tree.nodes[node.next].prev = child
    tree.nodes[parent].first = child
    if kind == ONE:
        tree.nodes[parent].one = child
    elif kind == MANY:
        tree.nodes[parent].many = child
    else:
        node.hash = hr_place(key, parent)
        index_put(tree.index, tree.places - 1, node.hash, child)
    tree.live += 1
    return child


cdef void tree_prune(WordTree* tree, uint32_t at) noexcept nogil:
    # Takes away `at` and then its ancestors, as long as no name ends there and nothing hangs below.
    cdef Node* node
    cdef Node* parent
    cdef uint32_t above
    while at != 0 and tree.nodes[at].ends == 0 and tree.nodes[at].first == 0:
        node = &tree.nodes[at]
        above = node.parent
        parent = &tree.nodes[above]
        if node.kind == ONE:
            parent.one = 0
        elif node.kind == MANY:
            parent.many = 0
        else:
            index_drop(tree, at)
        if node.prev != 0:
            tree.nodes[node.prev].next = node.next
        else:
            parent.first = node.next
        if node.next != 0:
            tree.nodes[node.next].prev = node.prev
        if node.length > sizeof(Text):
            free(node.text.far)
            tree.far -= node.length
        node.length = 0
        node.next = tree.returned
        tree.returned = at
        tree.live -= 1
        at = above


# ---- ids that a walk found, for Python ----

cdef struct Ids:
    uint32_t* items
    size_t count
    size_t room
    bint failed                # memory ran out: the list is not whole


cdef void collect(void* ctx, uint32_t id) noexcept:
    cdef Ids* ids = <Ids*> ctx
    cdef size_t room
    cdef uint32_t* items
    if ids.count == ids.room:
        room = ids.room * 2 + 16
        items = <uint32_t*> realloc(ids.items, room * sizeof(uint32_t))
        if items == NULL:
            ids.failed = True
            return
        ids.items = items
        ids.room = room
    ids.items[ids.count] = id
    ids.count += 1


cdef list sorted_ids(Ids* ids):
    cdef size_t i
    if ids.failed:
        raise MemoryError
    cdef list found = [ids.items[i] for i in range(ids.count)]
    found.sort()
    return found


# ---- the rules for names ----

cdef bytes name_bytes(object name):
    if isinstance(name, str):
        return (<str> name).encode("utf-8")
    if isinstance(name, bytes):
        return <bytes> name
    raise TypeError(f"a name is bytes or str, not {type(name).__name__}")


cdef int refuse_bad_filter(const char* filter, Py_ssize_t n) except -1:
    cdef const char* at = filter
    cdef Py_ssize_t words = 0
    if n == 0:
        raise ValueError("a filter must not be empty")
    if n > FILTER_BYTES:
        raise ValueError(f"a filter has at most {FILTER_BYTES} bytes, this one has {n}")
    if memchr(filter, 0, n) != NULL:
        raise ValueError("a filter must not contain a NUL byte")
    while at <= filter + n:
        at += word_length(at, filter + n) + 1
        words += 1
    if words > FILTER_WORDS:
        raise ValueError(f"a filter has at most {FILTER_WORDS} words, this one has {words}")
    return 0


cdef int refuse_bad_topic(Py_ssize_t n) except -1:
    if n == 0:
        raise ValueError("a topic must not be empty")
    if n > TOPIC_BYTES:
        raise ValueError(f"a topic has at most {TOPIC_BYTES} bytes, this one has {n}")
    return 0


def check_filter(filter):
    """Raises ValueError if a filter is empty, too long, has too many words or a NUL byte."""
    cdef bytes raw = name_bytes(filter)
    refuse_bad_filter(raw, len(raw))


def matches(filter, topic):
    """Whether one filter matches one topic."""
    cdef bytes f = name_bytes(filter)
    cdef bytes t = name_bytes(topic)
    refuse_bad_filter(f, len(f))
    refuse_bad_topic(len(t))
    return filter_matches(f, len(f), t, len(t))


# ---- filters ----

@cython.final
cdef class Trie:
    """Filters, each with an id; finds those that match a topic.

    The same filter added twice has one id and two references. An id is at least 1 and belongs to its filter
    until the last reference is removed; later it may be given out again.
    """

    def __cinit__(self):
        if tree_open(&self.tree) < 0:
            raise MemoryError

    def __dealloc__(self):
        tree_close(&self.tree)
        free(self.states)

    def __len__(self):
        return self.filters

    def __sizeof__(self):
        return sizeof(Trie) + tree_bytes(&self.tree) + 2 * self.states_room * sizeof(uint32_t)

    @property
    def nodes(self):
        """How many words the tree holds; words that filters share from their start count once."""
        return self.tree.live

    cpdef uint32_t add(self, bytes filter) except? 0:
        """Adds a filter, or a reference to it, and returns its id."""
        cdef const char* at = filter
        cdef const char* end = at + len(filter)
        cdef uint32_t node = 0
        cdef uint32_t child
        cdef size_t n
        refuse_bad_filter(at, end - at)
        while at <= end:
            n = word_length(at, end)
            child = tree_grow(&self.tree, node, at, n, word_kind(at, n))
            if child == 0:
                tree_prune(&self.tree, node)
                raise MemoryError
            node = child
            at += n + 1
        if self.tree.nodes[node].ends == 0:
            self.filters += 1
        self.tree.nodes[node].ends += 1
        return node

    cpdef bint remove(self, uint32_t id) except -1:
        """Drops one reference; True if it was the last and the filter is gone. KeyError for an unknown id."""
        if id == 0 or id >= self.tree.used or self.tree.nodes[id].ends == 0:
            raise KeyError(id)
        self.tree.nodes[id].ends -= 1
        if self.tree.nodes[id].ends != 0:
            return False
        self.filters -= 1
        tree_prune(&self.tree, id)
        return True

    cdef uint32_t enter(self, uint32_t* states, uint32_t count, uint32_t node) noexcept:
        # Puts a node into the list, with the `#` nodes below it, which may take no word at all. A node that
        # was already reached in this step has brought them along before.
        while self.tree.nodes[node].seen != self.step:
            self.tree.nodes[node].seen = self.step
            states[count] = node
            count += 1
            node = self.tree.nodes[node].many
            if node == 0:
                break
        return count

    cdef int match(self, const char* topic, Py_ssize_t n, Found found, void* ctx) except -1:
        """Calls `found` once for each filter that matches.

        All places in the tree where the words so far may lead are walked side by side, each one once, so that
        the cost is words times nodes at worst, whatever the filters are.
        """
        cdef const char* at = topic
        cdef const char* end = topic + n
        cdef uint32_t* now
        cdef uint32_t* then
        cdef uint32_t reached
        cdef uint32_t count
        cdef uint32_t i
        cdef uint32_t child
        cdef size_t length
        cdef uint64_t key
        cdef const Node* node
        refuse_bad_topic(n)
        if self.states_room < self.tree.room:
            now = <uint32_t*> realloc(self.states, 2 * <size_t> self.tree.room * sizeof(uint32_t))
            if now == NULL:
                raise MemoryError
            self.states = now
            self.states_room = self.tree.room
        now = self.states
        then = self.states + self.states_room
        self.step += 1
        reached = self.enter(now, 0, 0)
        while at <= end and reached != 0:
            length = word_length(at, end)
            key = hr_word_key(at, length, POINT)
            self.step += 1
            count = 0
            for i in range(reached):
                node = &self.tree.nodes[now[i]]
                if node.kind == MANY:
                    count = self.enter(then, count, now[i])
                if node.first != 0:
                    child = tree_child(&self.tree, now[i], key, at, length)
                    if child != 0:
                        count = self.enter(then, count, child)
                    if node.one != 0:
                        count = self.enter(then, count, node.one)
            now, then = then, now
            reached = count
            at += length + 1
        for i in range(reached):
            if self.tree.nodes[now[i]].ends != 0:
                found(ctx, now[i])
        return 0

    def matches(self, topic):
        """The ids of the filters that match a topic, in order."""
        cdef bytes raw = name_bytes(topic)
        cdef Ids ids
        memset(&ids, 0, sizeof(ids))
        try:
            self.match(raw, len(raw), collect, &ids)
            return sorted_ids(&ids)
        finally:
            free(ids.items)


# ---- topics ----

cdef void pattern_read(Pattern* pattern, const char* at, const char* end) noexcept nogil:
    cdef size_t n
    cdef int kind
    cdef int last = WORD
    cdef uint32_t i
    memset(pattern, 0, sizeof(Pattern))
    while at <= end:
        n = word_length(at, end)
        kind = word_kind(at, n)
        if kind != MANY or last != MANY:
            i = pattern.count
            pattern.words[i] = at
            pattern.lengths[i] = <uint16_t> n
            if kind == ONE:
                pattern.one[i >> 6] |= (<uint64_t> 1) << (i & 63)
            elif kind == MANY:
                pattern.many[i >> 6] |= (<uint64_t> 1) << (i & 63)
            else:
                pattern.ordinary[i >> 6] |= (<uint64_t> 1) << (i & 63)
            pattern.count += 1
        last = kind
        at += n + 1
    pattern.width = (pattern.count >> 6) + 1


cdef inline bint has(const uint64_t* positions, uint32_t i) noexcept nogil:
    return (positions[i >> 6] >> (i & 63)) & 1


cdef inline void pattern_skip(const Pattern* pattern, uint64_t* positions) noexcept nogil:
    # Who stands at a `#` may also stand behind it. One round will do, since no `#` follows another.
    cdef uint32_t w
    cdef uint64_t carry = 0
    cdef uint64_t skip
    for w in range(pattern.width):
        skip = positions[w] & pattern.many[w]
        positions[w] |= (skip << 1) | carry
        carry = skip >> 63


cdef bint pattern_step(
    const Pattern* pattern, const uint64_t* positions, const Node* node, uint64_t* after
) noexcept nogil:
    # Where the pattern may stand after this node's word; False if nowhere.
    cdef uint32_t w
    cdef uint32_t i
    cdef uint64_t ahead
    cdef uint64_t left
    cdef uint64_t carry = 0
    cdef uint64_t any = 0
    for w in range(pattern.width):
        ahead = positions[w] & pattern.one[w]
        left = positions[w] & pattern.ordinary[w]
        while left != 0:
            i = (w << 6) + hr_lowest_bit(left)
            if (
                pattern.lengths[i] == node.length
                and memcmp(pattern.words[i], node_text(node), node.length) == 0
            ):
                ahead |= left & -left
            left &= left - 1
        after[w] = (positions[w] & pattern.many[w]) | (ahead << 1) | carry
        carry = ahead >> 63
        any |= after[w]
    pattern_skip(pattern, after)
    return any != 0


cdef uint32_t pattern_first(
    const Pattern* pattern, const uint64_t* positions, const WordTree* tree, uint32_t node
) noexcept nogil:
    # The first child worth trying: any, where a wildcard stands; else the one child that the next word names.
    # Without a wildcard there is one position at most, since a `#`, once reached, stays.
    cdef uint32_t w
    cdef uint32_t i
    cdef uint64_t left
    if pattern_is_open(pattern, positions):
        return tree.nodes[node].first
    for w in range(pattern.width):
        left = positions[w] & pattern.ordinary[w]
        if left != 0:
            i = (w << 6) + hr_lowest_bit(left)
            return tree_child(
                tree, node, hr_word_key(pattern.words[i], pattern.lengths[i], POINT),
                pattern.words[i], pattern.lengths[i],
            )
    return 0


cdef inline bint pattern_is_open(const Pattern* pattern, const uint64_t* positions) noexcept nogil:
    cdef uint32_t w
    for w in range(pattern.width):
        if positions[w] & (pattern.one[w] | pattern.many[w]):
            return True
    return False


@cython.final
cdef class TopicTree:
    """Topics, each with an id that its owner chose; finds those that a filter matches."""

    def __cinit__(self):
        if tree_open(&self.tree) < 0:
            raise MemoryError

    def __dealloc__(self):
        tree_close(&self.tree)

    def __len__(self):
        return self.topics

    def __sizeof__(self):
        return sizeof(TopicTree) + tree_bytes(&self.tree)

    @property
    def nodes(self):
        """How many words the tree holds; words that topics share from their start count once."""
        return self.tree.live

    cpdef object add(self, bytes topic, uint32_t id):
        """Adds a topic. ValueError if it is there already."""
        cdef const char* at = topic
        cdef const char* end = at + len(topic)
        cdef uint32_t node = 0
        cdef uint32_t child
        cdef size_t n
        refuse_bad_topic(end - at)
        while at <= end:
            n = word_length(at, end)
            child = tree_grow(&self.tree, node, at, n, WORD)
            if child == 0:
                tree_prune(&self.tree, node)
                raise MemoryError
            node = child
            at += n + 1
        if self.tree.nodes[node].ends != 0:
            raise ValueError(f"the topic {topic!r} is there already")
        self.tree.nodes[node].ends = 1
        self.tree.nodes[node].id = id
        self.topics += 1

    cpdef object remove(self, bytes topic):
        """Takes a topic away. KeyError if it is not there."""
        cdef const char* at = topic
        cdef const char* end = at + len(topic)
        cdef uint32_t node = 0
        cdef size_t n
        while at <= end:
            n = word_length(at, end)
            node = tree_child(&self.tree, node, hr_word_key(at, n, POINT), at, n)
            if node == 0:
                break
            at += n + 1
        if self.tree.nodes[node].ends == 0:
            raise KeyError(topic)
        self.tree.nodes[node].ends = 0
        self.topics -= 1
        tree_prune(&self.tree, node)

    cdef void report_below(self, uint32_t top, Found found, void* ctx) noexcept:
        # `top` and everything under it, by the links between nodes: a topic may be too deep for recursion.
        cdef const Node* nodes = self.tree.nodes
        cdef uint32_t node = top
        while True:
            if nodes[node].ends != 0:
                found(ctx, nodes[node].id)
            if nodes[node].first != 0:
                node = nodes[node].first
                continue
            while node != top and nodes[node].next == 0:
                node = nodes[node].parent
            if node == top:
                return
            node = nodes[node].next

    cdef bint report(
        self, uint32_t node, const Pattern* pattern, const uint64_t* positions, Found found, void* ctx
    ) noexcept:
        # Tells of the topic that ends here, if it matches; True if what lies below needs no more walking
        # because a last `#` takes it all.
        if has(positions, pattern.count - 1) and has(pattern.many, pattern.count - 1):
            self.report_below(node, found, ctx)
            return True
        if has(positions, pattern.count) and self.tree.nodes[node].ends != 0:
            found(ctx, self.tree.nodes[node].id)
        return False

    cdef int visit(self, const char* filter, Py_ssize_t n, Found found, void* ctx) except -1:
        """Calls `found` once for each topic that the filter matches.

        Ordinary words at the start are looked up. From the first wildcard on, the tree is walked with the set
        of all positions in the filter where the words so far may lead, so that each node is seen once at most
        and a branch that leads nowhere is left at once.
        """
        cdef const char* at = filter
        cdef const char* end = filter + n
        cdef uint32_t node = 0
        cdef size_t length
        refuse_bad_filter(filter, n)
        while at <= end:
            length = word_length(at, end)
            if word_kind(at, length) != WORD:
                return self.visit_open(node, at, end, found, ctx)
            node = tree_child(&self.tree, node, hr_word_key(at, length, POINT), at, length)
            if node == 0:
                return 0
            at += length + 1
        if self.tree.nodes[node].ends != 0:
            found(ctx, self.tree.nodes[node].id)
        return 0

    cdef int visit_open(
        self, uint32_t node, const char* at, const char* end, Found found, void* ctx
    ) except -1:
        cdef const WordTree* tree = &self.tree
        cdef Pattern pattern
        cdef uint64_t* levels       # a set of positions for each level from the start node down
        cdef uint64_t* longer
        cdef size_t room = 16
        cdef size_t level = 0
        cdef uint32_t child
        pattern_read(&pattern, at, end)
        levels = <uint64_t*> malloc(room * pattern.width * sizeof(uint64_t))
        if levels == NULL:
            raise MemoryError
        memset(levels, 0, pattern.width * sizeof(uint64_t))
        levels[0] = 1
        pattern_skip(&pattern, levels)
        child = 0
        if not self.report(node, &pattern, levels, found, ctx):
            child = pattern_first(&pattern, levels, tree, node)
        while True:
            if child == 0:
                if level == 0:
                    break
                level -= 1
                if pattern_is_open(&pattern, levels + level * pattern.width):
                    child = tree.nodes[node].next
                node = tree.nodes[node].parent
                continue
            if level + 2 > room:
                longer = <uint64_t*> realloc(levels, room * 2 * pattern.width * sizeof(uint64_t))
                if longer == NULL:
                    free(levels)
                    raise MemoryError
                levels = longer
                room *= 2
            if (
                pattern_step(
                    &pattern, levels + level * pattern.width, &tree.nodes[child],
                    levels + (level + 1) * pattern.width,
                )
                and not self.report(child, &pattern, levels + (level + 1) * pattern.width, found, ctx)
            ):
                level += 1
                node = child
                child = pattern_first(&pattern, levels + level * pattern.width, tree, node)
            elif pattern_is_open(&pattern, levels + level * pattern.width):
                child = tree.nodes[child].next
            else:
                child = 0
        free(levels)
        return 0

    def find(self, filter):
        """The ids of the topics that a filter matches, in order."""
        cdef bytes raw = name_bytes(filter)
        cdef Ids ids
        memset(&ids, 0, sizeof(ids))
        try:
            self.visit(raw, len(raw), collect, &ids)
            return sorted_ids(&ids)
        finally:
            free(ids.items)
