/* See pair.h. Usage for every program: PROGRAM PATH SIZE... */

#include "pair.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define MOST_MESSAGES 500
#define MOST_STREAMED 4096
/* Least bytes and most messages per stream window. */
#define WINDOW_BYTES ((size_t)1 << 20)
#define WINDOW_MESSAGES ((size_t)64)

/* Barrier between both processes, during which messages in flight make progress. */
static void meet(struct pair *pair)
{
    uint8_t byte = 0;
    if (write(pair->socket, &byte, 1) != 1)
        fail("meet", "the other process is gone");
    for (;;) {
        ssize_t got = recv(pair->socket, &byte, 1, MSG_DONTWAIT);
        if (got == 1)
            return;
        if (got == 0 || (errno != EAGAIN && errno != EINTR))
            fail("meet", "the other process is gone");
        make_progress();
    }
}

static int arrived_whole(const struct pair *pair, size_t offset, size_t length)
{
    const uint8_t *inbox = pair->inbox + offset;
    for (size_t at = 0; at < length; at += 8) {
        uint64_t word = source_word(!pair->rank, (offset + at) / 8);
        if (memcmp(inbox + at, &word, length - at < 8 ? length - at : 8))
            return 0;
    }
    return 1;
}

static size_t clamp(size_t value, size_t least, size_t most)
{
    return value < least ? least : value > most ? most : value;
}

static size_t stride_of(size_t length)
{
    return (length + 63) / 64 * 64;
}

/* Slots for the next `count` messages. */
static void take_slots(const struct pair *pair, size_t length, int count, size_t *offsets)
{
    static size_t next;
    size_t stride = stride_of(length), slots = pair->region / stride;
    size_t first = (next + stride - 1) / stride;
    for (int message = 0; message < count; message++)
        offsets[message] = (first + message) % slots * stride;
    next = (first + count) % slots * stride;
}

/* Counts wrong messages, and overwrites them. */
static int check(struct pair *pair, size_t length, int count, const size_t *offsets)
{
    int wrong = 0;
    for (int message = 0; message < count; message++) {
        wrong += !arrived_whole(pair, offsets[message], length);
        memset(pair->inbox + offsets[message], 0, length);
    }
    return wrong;
}

/* Ping-pong; returns how many messages were wrong, and the times. */
static int ping_pong(struct pair *pair, size_t length, int count, double *one_way)
{
    static size_t offsets[MOST_MESSAGES];
    take_slots(pair, length, count, offsets);
    meet(pair);
    double last = now();
    for (int message = 0; message < count; message++) {
        if (pair->rank == 0)
            send_message(pair, offsets[message], length);
        receive_message(pair, offsets[message], length);
        double arrived = now();
        one_way[message] = (arrived - last) / 2;
        last = arrived;
        if (pair->rank == 1)
            send_message(pair, offsets[message], length);
    }
    meet(pair);
    return check(pair, length, count, offsets);
}

/* Stream from rank 0 to rank 1; returns how many messages were wrong, and the mean time per message. */
static int stream_messages(struct pair *pair, const struct stream *stream, size_t length, int count,
                           double *one_way)
{
    static size_t offsets[MOST_STREAMED];
    take_slots(pair, length, count, offsets);
    int window = clamp(WINDOW_BYTES / length, 1, WINDOW_MESSAGES), windows = 0;
    meet(pair);
    double begin = now();
    for (int first = 0; first < count; first += window, windows++) {
        int messages = count - first < window ? count - first : window;
        if (pair->rank == 1) {
            stream->receive(pair, messages);
            stream->acknowledge(pair);
            continue;
        }
        if (windows >= 2)
            stream->await_acknowledged(pair, 1);
        for (int message = first; message < first + messages; message++)
            stream->send(pair, offsets[message], length);
    }
    if (pair->rank == 0)
        stream->await_acknowledged(pair, windows < 2 ? windows : 2);
    *one_way = (now() - begin) / count;
    meet(pair);
    return pair->rank == 1 ? check(pair, length, count, offsets) : 0;
}

/* Prints both ranks' times, from an index on. */
static void print(const char *pattern, const char *side, size_t length, int wrong, double *const times[2],
                  const int begin[2], int count)
{
    printf("{\"pattern\": \"%s\", \"side\": \"%s\", \"bytes\": %zu, \"wrong\": %d, ", pattern, side,
           length, wrong);
    for (int rank = 0; rank < 2; rank++) {
        printf(rank ? "], [" : "\"one_way_ns\": [[");
        for (int message = begin[rank]; message < count; message++)
            printf("%s%.1f", message > begin[rank] ? ", " : "", times[rank][message]);
    }
    printf("]]}\n");
    fflush(stdout);
}

static void work(struct pair *pair, const char *side, const struct stream *stream, int sizes, char **size)
{
    static double mine[MOST_MESSAGES], theirs[MOST_MESSAGES];
    double *const times[2] = { mine, theirs };
    int wrong_there;
    ping_pong(pair, LONGEST, pair->region / LONGEST, mine);
    for (int index = 0; index < sizes; index++) {
        size_t length = strtoul(size[index], NULL, 10);
        if (length == 0 || length > LONGEST)
            fail(size[index], "choose 1 to 67108864 bytes");
        int count = clamp(((size_t)16 << 20) / length, 2, MOST_MESSAGES);
        ping_pong(pair, length, count < 50 ? count : 50, mine);
        int wrong = ping_pong(pair, length, count, mine);
        exchange(pair, mine, theirs, count * sizeof *mine);
        exchange(pair, &wrong, &wrong_there, sizeof wrong);
        /* Rank 1's first interval began before a message was sent. */
        if (pair->rank == 0)
            print("ping-pong", side, length, wrong + wrong_there, times, (int[]){ 0, 1 }, count);
        if (stream == NULL)
            continue;
        count = clamp(((size_t)64 << 20) / length, 3, MOST_STREAMED);
        count = clamp(count, 1, pair->region / stride_of(length));
        wrong = stream_messages(pair, stream, length, count, mine);
        wrong += stream_messages(pair, stream, length, count, mine);
        exchange(pair, mine, theirs, sizeof *mine);
        exchange(pair, &wrong, &wrong_there, sizeof wrong);
        if (pair->rank == 0)
            print("stream", side, length, wrong + wrong_there, times, (int[]){ 0, 0 }, 1);
    }
    meet(pair);
}

int run_pair(int count, char **arguments, const char *side, const struct stream *stream)
{
    if (count < 3)
        fail(arguments[0], "usage: PROGRAM PATH SIZE...");
    struct pair pair;
    int child = open_pair(&pair, arguments[1]);
    work(&pair, side, stream, count - 2, arguments + 2);
    if (child == 0)
        _exit(0);
    int status;
    waitpid(child, &status, 0);
    return status != 0;
}
