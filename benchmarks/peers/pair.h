/* Pair of processes for a peer's benchmark: memory, slots, the check of every byte, both patterns.
 *
 * The measurement equals `weft-bench-fabric transfer --samples`. Ping-pong: a message goes from rank 0 to
 * rank 1, one of the same size comes back, and one way is half of the time from one arrival to the next.
 * Stream: rank 0 sends windows of messages, two of which are in flight, and rank 1 acknowledges each
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
    /* Connection of the two processes, for messages before the peer's library is set up. */
    int socket;
    uint8_t *source;
    uint8_t *inbox;
    size_t region;
};

/* Functions of a program. `path` is its second argument, such as `shm`. A failure ends the process. */
void open_side(struct pair *pair, const char *path);
void send_message(struct pair *pair, size_t offset, size_t length);
void receive_message(struct pair *pair, size_t offset, size_t length);
void make_progress(void);

/* Operations of a stream. */
struct stream {
    /* Starts a message; returns before it has left. */
    void (*send)(struct pair *pair, size_t offset, size_t length);
    /* Returns after the arrival of `count` further messages. */
    void (*receive)(struct pair *pair, size_t count);
    /* Sends an acknowledgement without bytes. */
    void (*acknowledge)(struct pair *pair);
    /* Returns after the arrival of `count` further acknowledgements. */
    void (*await_acknowledged)(struct pair *pair, size_t count);
};

/* Functions for programs. `stream` is null for a program without streams. */
int run_pair(int count, char **arguments, const char *side, const struct stream *stream);
void exchange(struct pair *pair, const void *mine, void *theirs, size_t length);
_Noreturn void fail(const char *what, const char *why);

#endif
