/* Queries over bare libfabric: `weft-bench-fabric dispatch` runs it as its side `libfabric`.
 * Usage: ofi-queries PATH BYTES SLOTS SECONDS ROUND_TRIPS
 *
 * Rank 0 keeps SLOTS queries, each a header and BYTES bytes, in flight, read one after another from a source several times
 * as large as the last-level cache. Rank 1 answers each with a header, the query's first 8 bytes, and for one
 * query in SUMMED the sum over all its words. Rank 0 compares each answer. One thread at each end polls without a pause. */

#include "ofi.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define HEADER ((size_t)64)
#define ANSWER ((size_t)16)
#define SUMMED 64
/* Bytes in an answer's place. */
#define PLACE ((size_t)128)
/* Queries between two polls on a front end that has free slots. */
#define BURST 16

static size_t bytes, slots, wrong;

static uint64_t sum(const uint8_t *data)
{
    uint64_t total = 0, word;
    for (size_t at = 0; at + 8 <= bytes; at += 8)
        total += (memcpy(&word, data + at, 8), word);
    return total;
}

/* Answer to the query with this number, whose bytes are at `data`. */
static void answer(uint64_t *out, uint64_t number, const uint8_t *data)
{
    memcpy(out, data, 8);
    out[1] = number % SUMMED == 0 ? sum(data) : 0;
}

static size_t stride(void)
{
    return (HEADER + bytes + 63) / 64 * 64;
}

/* Place in the source of the query with this number, which has the header's bytes in front. */
static size_t sample(const struct pair *pair, uint64_t number)
{
    return number % (pair->region / stride()) * stride();
}

static void serve(struct pair *pair)
{
    uint8_t end;
    for (uint64_t number = 0; recv(pair->socket, &end, 1, MSG_DONTWAIT) != 1;) {
        make_progress();
        for (size_t count = take_arrivals(); count > 0; count--, number++) {
            size_t place = number % slots * PLACE;
            const uint8_t *query = pair->inbox + number % slots * stride() + HEADER;
            answer((uint64_t *)(pair->source + place + HEADER), number, query);
            write_from_to(pair, place, place, HEADER + ANSWER);
        }
    }
}

struct front_end {
    uint64_t sent, answered;
};

static void send_query(struct pair *pair, struct front_end *end)
{
    size_t slot = end->sent % slots * stride();
    write_from_to(pair, sample(pair, end->sent++), slot, HEADER + bytes);
}

static void take_answers(struct pair *pair, struct front_end *end)
{
    make_progress();
    for (size_t count = take_arrivals(); count > 0; count--, end->answered++) {
        uint64_t expected[2];
        answer(expected, end->answered, pair->source + sample(pair, end->answered) + HEADER);
        const uint8_t *found = pair->inbox + end->answered % slots * PLACE + HEADER;
        wrong += memcmp(found, expected, ANSWER) != 0;
    }
}

/* Sends queries for a time, and waits for their answers. Returns queries per second. */
static double send_for(struct pair *pair, struct front_end *end, double seconds)
{
    double begin = now();
    uint64_t first = end->sent;
    while (now() - begin < seconds * 1e9) {
        for (int burst = 0; burst < BURST && end->sent - end->answered < slots; burst++)
            send_query(pair, end);
        take_answers(pair, end);
    }
    while (end->answered < end->sent)
        take_answers(pair, end);
    return (end->sent - first) / (now() - begin) * 1e9;
}

static void measure(struct pair *pair, double seconds, int trips)
{
    struct front_end end = { 0 };
    send_for(pair, &end, seconds / 5);
    double rate = send_for(pair, &end, seconds);
    printf("{\"queries_per_s\": %.1f, \"round_trips_ns\": [", rate);
    for (int trip = 0; trip < trips; trip++) {
        double begin = now();
        send_query(pair, &end);
        while (end.answered < end.sent)
            take_answers(pair, &end);
        printf("%s%.1f", trip ? ", " : "", now() - begin);
    }
    printf("], \"wrong\": %zu}\n", wrong);
}

int main(int count, char **arguments)
{
    if (count != 6)
        fail(arguments[0], "usage: ofi-queries PATH BYTES SLOTS SECONDS ROUND_TRIPS");
    bytes = strtoul(arguments[2], NULL, 10);
    slots = strtoul(arguments[3], NULL, 10);
    struct pair pair;
    int child = open_pair(&pair, arguments[1]);
    if (bytes < 8 || slots == 0 || slots * stride() > pair.region || slots * PLACE > pair.region)
        fail(arguments[0], "choose at least 8 bytes, and slots that fit in the region");
    if (child == 0) {
        serve(&pair);
        _exit(0);
    }
    measure(&pair, strtod(arguments[4], NULL), atoi(arguments[5]));
    if (write(pair.socket, "", 1) != 1)
        fail("write", "the other process is gone");
    int status;
    waitpid(child, &status, 0);
    return wrong != 0 || status != 0;
}
