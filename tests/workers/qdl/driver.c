/* CUDA driver for copy tests: device memory is process memory, and a stream's copies
 * run when it is synchronised, so that one that ends too late, or whose memory is gone, is seen.
 * Host memory must be page-locked, and capture relaxed, as on threads beside a capture.
 * Functions that the test's program does not list here return an error. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    size_t src_x, src_y;
    unsigned src_type;
    const void *src_host;
    uint64_t src_device;
    void *src_array;
    size_t src_pitch, dst_x, dst_y;
    unsigned dst_type;
    void *dst_host;
    uint64_t dst_device;
    void *dst_array;
    size_t dst_pitch, width, height;
} Copy2D;

typedef struct {
    char *to;
    const char *from;
    size_t to_pitch, from_pitch, width, height;
} Copy;

enum { STREAMS = 4, MOST = 4096, HOST = 1, DEVICE = 2, RELAXED = 2 };
static Copy queues[STREAMS][MOST];
static int lengths[STREAMS];
static struct { char *begin; size_t bytes; } pinned[MOST];
static int pins;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread void *current;
static __thread int capture_mode;
static int context, is_dead;
/* Counts for the test: strided copies, their rows, single copies, registrations, their ends. */
int strided, rows, single, registered, unregistered;
/* Index of the copy that fails; count of waits for a stream with outputs that fail, at most until
 * one for the device; 1 if that fails, too, which ends the context. */
int fail_at, sync_fails, device_fails;

static unsigned check(int bad, const char *what) {
    if (bad) {
        fprintf(stderr, "driver: %s\n", what);
        abort();
    }
    return 0;
}

unsigned cuInit(unsigned flags) { return flags; }
unsigned cuDriverGetVersion(int *version) { *version = 13000; return 0; }
unsigned cuGetErrorName(unsigned code, const char **text) { (void)code; *text = "FAKE"; return 0; }
unsigned cuGetErrorString(unsigned code, const char **text) { (void)code; *text = "fake"; return 0; }
unsigned cuDeviceGetCount(int *count) { *count = 1; return 0; }
unsigned cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
unsigned cuDeviceGetName(char *name, int bytes, int device) { (void)device; strncpy(name, "fake", bytes); return 0; }
unsigned cuDeviceGetUuid_v2(void *uuid, int device) { (void)device; memset(uuid, 0, 16); return 0; }
unsigned cuDeviceGetPCIBusId(char *name, int bytes, int device) { (void)device; strncpy(name, "0000:00:00.0", bytes); return 0; }
unsigned cuDeviceGetAttribute(int *value, unsigned which, int device) { (void)which; (void)device; *value = 1; return 0; }
unsigned cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = 1 << 30; return 0; }
unsigned cuDevicePrimaryCtxRetain(void **handle, int device) { (void)device; *handle = &context; return 0; }
unsigned cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }
unsigned cuCtxGetCurrent(void **handle) { *handle = current; return 0; }
unsigned cuCtxSetCurrent(void *handle) { current = handle; return 0; }
unsigned cuThreadExchangeStreamCaptureMode(int *mode) {
    int earlier = capture_mode;
    capture_mode = *mode;
    *mode = earlier;
    return 0;
}

unsigned cuMemHostRegister_v2(void *begin, size_t bytes, unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    for (int at = 0; at < pins; at++)
        check(pinned[at].begin == begin, "memory is registered twice");
    pinned[pins].begin = begin;
    pinned[pins++].bytes = bytes;
    registered++;
    pthread_mutex_unlock(&lock);
    return check(!current || capture_mode != RELAXED, "no context, or capture is not relaxed");
}

unsigned cuMemHostUnregister(void *begin) {
    pthread_mutex_lock(&lock);
    int at = 0;
    while (at < pins && pinned[at].begin != begin)
        at++;
    check(at == pins, "memory is not registered");
    /* It is still mapped, and no copy of it is under way. */
    volatile char last = pinned[at].begin[pinned[at].bytes - 1];
    (void)last;
    for (int stream = 0; stream < STREAMS; stream++)
        for (int copy = 0; copy < lengths[stream]; copy++) {
            const char *to = queues[stream][copy].to, *from = queues[stream][copy].from;
            char *first = pinned[at].begin, *end = first + pinned[at].bytes;
            check((to >= first && to < end) || (from >= first && from < end), "a copy is under way");
        }
    pinned[at] = pinned[--pins];
    unregistered++;
    pthread_mutex_unlock(&lock);
    return check(!current || capture_mode != RELAXED, "no context, or capture is not relaxed");
}

/* True for rows in one page-locked range. Under the lock, as all below. */
static int is_pinned(const char *begin, size_t pitch, const Copy *copy) {
    const char *end = begin + (copy->height - 1) * pitch + copy->width;
    for (int at = 0; at < pins; at++)
        if (begin >= pinned[at].begin && end <= pinned[at].begin + pinned[at].bytes)
            return 1;
    return 0;
}

static int is_output(const Copy *copy) { return is_pinned(copy->to, copy->to_pitch, copy); }

static unsigned add(Copy copy, int is_strided, uint64_t stream) {
    check(!current || stream == 0 || stream >= STREAMS, "no context or stream");
    check(capture_mode != RELAXED, "capture is not relaxed");
    pthread_mutex_lock(&lock);
    check(lengths[stream] == MOST, "too many copies");
    strided += is_strided;
    single += !is_strided;
    rows += is_strided ? copy.height : 0;
    int is_input = is_pinned(copy.from, copy.from_pitch, &copy);
    check(is_input + is_output(&copy) != 1, "expected page-locked memory at one end");
    int fails = is_dead || (fail_at && strided + single == fail_at);
    fail_at = fails ? 0 : fail_at;
    if (!fails)
        queues[stream][lengths[stream]++] = copy;
    pthread_mutex_unlock(&lock);
    return fails ? 1 : 0;
}

unsigned cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, uint64_t stream) {
    return add((Copy){(char *)to, (char *)from, bytes, bytes, bytes, 1}, 0, stream);
}

unsigned cuMemcpy2DAsync_v2(const Copy2D *copy, uint64_t stream) {
    int in = copy->src_type == HOST && copy->dst_type == DEVICE;
    int out = copy->src_type == DEVICE && copy->dst_type == HOST;
    check(!in && !out, "types of memory");
    check(copy->width > copy->src_pitch || copy->width > copy->dst_pitch, "a pitch");
    check(copy->src_x || copy->src_y || copy->dst_x || copy->dst_y, "an offset");
    const char *from = in ? copy->src_host : (const char *)copy->src_device;
    char *to = in ? (char *)copy->dst_device : copy->dst_host;
    Copy rows = {to, from, copy->dst_pitch, copy->src_pitch, copy->width, copy->height};
    return add(rows, 1, stream);
}

static void complete(uint64_t stream) {
    for (int at = 0; at < lengths[stream]; at++) {
        Copy copy = queues[stream][at];
        for (size_t row = 0; row < copy.height; row++)
            memcpy(copy.to + row * copy.to_pitch, copy.from + row * copy.from_pitch, copy.width);
    }
    lengths[stream] = 0;
}

unsigned cuStreamSynchronize(uint64_t stream) {
    check(stream == 0 || stream >= STREAMS, "no stream");
    pthread_mutex_lock(&lock);
    int fails = is_dead, outputs = 0;
    for (int at = 0; at < lengths[stream]; at++)
        outputs += is_output(&queues[stream][at]);
    /* The test's model waits for inputs. */
    check(outputs && capture_mode != RELAXED, "capture is not relaxed");
    if (outputs && sync_fails) {
        sync_fails--;
        fails = 1;
    }
    if (!fails)
        complete(stream);
    pthread_mutex_unlock(&lock);
    return fails ? 1 : 0;
}

unsigned cuCtxSynchronize(void) {
    check(!current || capture_mode != RELAXED, "no context, or capture is not relaxed");
    pthread_mutex_lock(&lock);
    is_dead |= device_fails;
    sync_fails = 0;
    for (int stream = 1; stream < STREAMS && !is_dead; stream++)
        complete(stream);
    pthread_mutex_unlock(&lock);
    return is_dead ? 1 : 0;
}
