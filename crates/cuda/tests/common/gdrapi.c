// Stand-in for libgdrapi.so.2 over host memory: the mapping is the memory itself.
//
// Compiled with -DLOG="FILE", to which each call appends a line; -DFAIL="FUNCTION", which then fails; -DSHIFT=BYTES, by
// which the mapping begins before the address; -DMAPPED_BYTES=BYTES, the size that gdr_get_info reports.

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef FAIL
#define FAIL ""
#endif
#ifndef SHIFT
#define SHIFT 0
#endif

// As in gdrapi.h; gdr_info_v1 there is what gdr_get_info writes.
typedef struct gdr *gdr_t;
typedef struct {
    unsigned long h;
} gdr_mh_t;
typedef struct {
    uint64_t va;
    uint64_t mapped_size;
    uint32_t page_size;
    uint64_t tm_cycles;
    uint32_t cycles_per_ms;
    unsigned mapped : 1;
    unsigned wc_mapping : 1;
} gdr_info_t;
_Static_assert(sizeof(gdr_info_t) == 40, "gdr_info_v1");

struct gdr {
    pid_t process;
    struct pin {
        uint64_t address;
        size_t size;
        void *mapping;
    } *pin;
};

static int begins(const char *function, gdr_t g, int valid) {
#ifdef LOG
    FILE *log = fopen(LOG, "a");
    if (log != NULL) {
        fprintf(log, "%s\n", function);
        fclose(log);
    }
#endif
    if (strcmp(function, FAIL) == 0)
        return ENOMEM;
    // The driver rejects other processes.
    if (g != NULL && g->process != getpid())
        return EACCES;
    return valid ? 0 : EINVAL;
}

gdr_t gdr_open(void) {
    if (begins("gdr_open", NULL, 1) != 0)
        return NULL;
    gdr_t g = calloc(1, sizeof(*g));
    g->process = getpid();
    return g;
}

int gdr_close(gdr_t g) {
    int code = begins("gdr_close", g, g->pin == NULL);
    if (code == 0)
        free(g);
    return code;
}

int gdr_pin_buffer(gdr_t g, unsigned long address, size_t size, uint64_t p2p_token, uint32_t va_space, gdr_mh_t *handle) {
    int code = begins("gdr_pin_buffer", g, address != 0 && p2p_token == 0 && va_space == 0 && g->pin == NULL);
    if (code != 0)
        return code;
    g->pin = calloc(1, sizeof(*g->pin));
    g->pin->address = address;
    g->pin->size = size;
    handle->h = (unsigned long)g->pin;
    return 0;
}

int gdr_unpin_buffer(gdr_t g, gdr_mh_t handle) {
    int code = begins("gdr_unpin_buffer", g, handle.h == (unsigned long)g->pin && g->pin->mapping == NULL);
    if (code != 0)
        return code;
    free(g->pin);
    g->pin = NULL;
    return 0;
}

int gdr_map(gdr_t g, gdr_mh_t handle, void **va, size_t size) {
    // The driver maps whole GPU pages only.
    int valid = handle.h == (unsigned long)g->pin && g->pin->address % 65536 == 0 && size % 65536 == 0 && size <= g->pin->size;
    int code = begins("gdr_map", g, valid);
    if (code != 0)
        return code;
    g->pin->mapping = (void *)(uintptr_t)(g->pin->address - SHIFT);
    *va = g->pin->mapping;
    return 0;
}

int gdr_get_info(gdr_t g, gdr_mh_t handle, gdr_info_t *info) {
    int code = begins("gdr_get_info", g, handle.h == (unsigned long)g->pin);
    if (code != 0)
        return code;
    memset(info, 0, sizeof(*info));
    info->va = g->pin->address - SHIFT;
#ifdef MAPPED_BYTES
    info->mapped_size = MAPPED_BYTES;
#else
    info->mapped_size = g->pin->size;
#endif
    info->page_size = 65536;
    info->mapped = info->wc_mapping = 1;
    return 0;
}

int gdr_unmap(gdr_t g, gdr_mh_t handle, void *va, size_t size) {
    int code = begins("gdr_unmap", g, handle.h == (unsigned long)g->pin && va == g->pin->mapping && size % 65536 == 0);
    if (code == 0)
        g->pin->mapping = NULL;
    return code;
}
