/* See pair.h. */

#include "pair.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

_Noreturn void fail(const char *what, const char *why)
{
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}

void exchange(struct pair *pair, const void *mine, void *theirs, size_t length)
{
    if (write(pair->socket, mine, length) != (ssize_t)length)
        fail("exchange", "the other process is gone");
    for (size_t done = 0; done < length;) {
        ssize_t got = read(pair->socket, (uint8_t *)theirs + done, length - done);
        if (got <= 0)
            fail("exchange", "the other process is gone");
        done += got;
    }
}

static size_t region_bytes(void)
{
    size_t largest = 0;
    for (int index = 0; index < 8; index++) {
        char path[80];
        unsigned long kib;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", index);
        FILE *file = fopen(path, "r");
        if (file && fscanf(file, "%luK", &kib) == 1 && kib << 10 > largest)
            largest = kib << 10;
        if (file)
            fclose(file);
    }
    size_t regions = ((largest ? largest : 4 * LONGEST) + LONGEST - 1) / LONGEST;
    return (regions < 2 ? 2 : regions) * LONGEST;
}

uint64_t source_word(int rank, size_t index)
{
    uint64_t word = index * 0x9e3779b97f4a7c15u | (uint64_t)1 << 63;
    return rank ? word ^ 0x5bd1e9957f4a7c15u : word;
}

double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1e9 + at.tv_nsec;
}

static uint8_t *map(size_t length)
{
    void *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        fail("mmap", "no memory");
    return memory;
}

int open_pair(struct pair *pair, const char *path)
{
    int sockets[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets))
        fail("socketpair", "cannot be made");
    pid_t child = fork();
    if (child < 0)
        fail("fork", "no process");
    if (child == 0)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(sockets[child == 0 ? 0 : 1]);
    *pair = (struct pair){ .rank = child == 0, .socket = sockets[child == 0 ? 1 : 0] };
    pair->region = region_bytes();
    pair->source = map(pair->region);
    pair->inbox = map(pair->region);
    for (size_t index = 0; index < pair->region / 8; index++)
        ((uint64_t *)pair->source)[index] = source_word(pair->rank, index);
    memset(pair->inbox, 0, pair->region);
    open_side(pair, path);
    return child;
}
