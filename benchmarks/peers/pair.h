/* Process pair for a peer's benchmark: memory, slots, the check on every byte, both patterns.
 *
 * The measurement equals `weft-bench-fabric transfer --samples`. Ping-pong: a message goes from rank 0 to
 * rank 1, one with the same size comes back, and one way is half the time from one arrival to the next.
 * Stream: rank 0 sends windows of messages, two of which are in flight, and rank 1 acknowledges each
 * window; the time ends with the last acknowledgement. Slots are used in turn through regions that are
 * together several times as large as the last-level cache; every message is checked and its slot
 * overwritten, outside the measured time.
 *
 * A program defines the functions that are declared here and calls `run_pair`, or `open_pair` and
 * measures itself. */

#ifndef PAIR_H
#define PAIR_H

#include <stddef.h>
#include <stdint.h>

struct pair {
    int rank;
    /* Connection between the two processes, for messages before the peer's library is set up. */
    int socket;
    uint8_t *source;
    uint8_t *inbox;
    size_t region;
};

/* Longest message. */
#define LONGEST ((size_t)64 << 20)

/* Functions that a program defines. `path` is an argument such as `shm`. A failure ends the process. */
void open_side(struct pair *pair, const char *path);
void make_progress(void);
/* Functions for a program that calls `run_pair`. */
void send_message(struct pair *pair, size_t offset, size_t length);
void receive_message(struct pair *pair, size_t offset, size_t length);

/* Stream operations. */
struct stream {
    /* Starts a message; returns before it has left. */
    void (*send)(struct pair *pair, size_t offset, size_t length);
    /* Returns once `count` further messages have arrived. */
    void (*receive)(struct pair *pair, size_t count);
    /* Sends an acknowledgement without bytes. */
    void (*acknowledge)(struct pair *pair);
    /* Returns once `count` further acknowledgements have arrived. */
    void (*await_acknowledged)(struct pair *pair, size_t count);
};

/* Forks; each process gets its memory and connection, and opens its side. Returns 0 in rank 1. */
int open_pair(struct pair *pair, const char *path);
/* Measures messages (messages.c). `stream` is null for a program without streams. */
int run_pair(int count, char **arguments, const char *side, const struct stream *stream);
void exchange(struct pair *pair, const void *mine, void *theirs, size_t length);
/* Word in a rank's source. */
uint64_t source_word(int rank, size_t index);
/* Nanoseconds. */
double now(void);
_Noreturn void fail(const char *what, const char *why);

#endif
