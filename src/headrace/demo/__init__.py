"""What `headrace demo` shows: a gateway as a child, a plant whose devices and services speak all five protocols to it,
and the books that have to balance at the end. It knows the gateway from the outside only: sockets, files, status."""
