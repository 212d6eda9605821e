/* Two processes that a peer's benchmark runs in: memory, slots, the check of every byte, both patterns.
 *
 * It measures as `weft-bench-fabric transfer --samples` does. Ping-pong: a message goes from rank 0 to
 * rank 1, one of the same size comes back, and one way is half of the time from one arrival to the next.
 * Stream: rank 0 sends windows of messages, two of which are under way, and rank 1 acknowledges each
 * window; the time ends with the last acknowledgement. Slots are used in turn through regions that are
 * together several times as large as the last-level cache; every message is checked and its slot
 * overwritten, outside of the measured time.
 *
 * A program defines the functions that are declared here and calls `run_pair`. */

#ifndef PAIR_H
#define PAIR_H

#include <stddef.h>
#include <stdint.h>

struct pair {
    int rank;
    /* Connects the two processes, for what must be said before the peer's library can. */
    int socket;
    uint8_t *source;
    uint8_t *inbox;
    size_t region;
};

/* What a program defines. `path` is its second argument, such as `shm`. They end the process if they
 * fail. */
void open_side(struct pair *pair, const char *path);
void send_message(struct pair *pair, size_t offset, size_t length);
void receive_message(struct pair *pair, size_t offset, size_t length);
void make_progress(void);

/* A stream's operations. */
struct stream {
    /* Starts a message; returns before it has left. */
    void (*send)(struct pair *pair, size_t offset, size_t length);
    /* Returns once so many further messages have arrived. */
    void (*receive)(struct pair *pair, size_t count);
    /* Sends an acknowledgement, which has no bytes. */
    void (*acknowledge)(struct pair *pair);
    /* Returns once so many further acknowledgements have arrived. */
    void (*await_acknowledged)(struct pair *pair, size_t count);
};

/* What it may use. `stream` is null for a program that has none. */
int run_pair(int count, char **arguments, const char *side, const struct stream *stream);
void exchange(struct pair *pair, const void *mine, void *theirs, size_t length);
_Noreturn void fail(const char *what, const char *why);

#endif
