/* What a connection asks of its socket beyond reading and writing. It knows nothing of event loops or sessions. */
#ifndef HEADRACE_SOCKETS_H
#define HEADRACE_SOCKETS_H

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#ifdef __linux__
#include <linux/sockios.h>
#endif

/* Small frames leave at once. A socket on which this fails works all the same, only slower. */
static inline void hr_nodelay(int fd) {
    int on = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

/* Acknowledges what was read without waiting for an answer to carry it. The kernel forgets this by itself, so it
   is asked again after every read. */
static inline void hr_quickack(int fd) {
#ifdef TCP_QUICKACK
    int on = 1;
    (void)setsockopt(fd, IPPROTO_TCP, TCP_QUICKACK, &on, sizeof on);
#else
    (void)fd;
#endif
}

/* Whether closing the socket now could cost the peer bytes that it has not read: input that nobody read makes the
   kernel reset the connection, and a reset overtakes output that is still on its way. */
static inline int hr_unsettled(int fd) {
    int bytes = 0;
    if (ioctl(fd, FIONREAD, &bytes) == 0 && bytes > 0) return 1;
#ifdef SIOCOUTQ
    if (ioctl(fd, SIOCOUTQ, &bytes) == 0 && bytes > 0) return 1;
#endif
    return 0;
}

#endif
