/* UCX: ucp_put_nbx for the bytes, a fence, and a put to a flag that the receiver polls. Paths: shm
 * (UCX_TLS posix,cma), tcp. */

#include "pair.h"

#include <stdlib.h>
#include <string.h>
#include <ucp/api/ucp.h>

static ucp_worker_h worker;
static ucp_ep_h endpoint;
static ucp_rkey_h inbox_key, flag_key;
static uint64_t peer_inbox, peer_flag;
/* The first word is raised by the peer; the second counts our raises on the peer's word. */
static uint64_t *flags;
static uint64_t seen;

static void must(const char *what, ucs_status_t status)
{
    if (status != UCS_OK && status != UCS_INPROGRESS)
        fail(what, ucs_status_string(status));
}

static ucp_mem_h expose(ucp_context_h context, void *address, size_t length)
{
    ucp_mem_h memory;
    ucp_mem_map_params_t parameters = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
        .address = address, .length = length,
    };
    must("ucp_mem_map", ucp_mem_map(context, &parameters, &memory));
    return memory;
}

static ucp_rkey_h trade_key(struct pair *pair, ucp_context_h context, ucp_mem_h memory, void *address,
                            uint64_t *peer_address)
{
    uint64_t mine[2], theirs[2];
    void *packed;
    size_t length;
    must("ucp_rkey_pack", ucp_rkey_pack(context, memory, &packed, &length));
    mine[0] = (uint64_t)address;
    mine[1] = length;
    exchange(pair, mine, theirs, sizeof mine);
    if (theirs[1] != length)
        fail("ucp_rkey_pack", "the keys differ in length");
    void *key = malloc(length);
    exchange(pair, packed, key, length);
    ucp_rkey_h unpacked;
    must("ucp_ep_rkey_unpack", ucp_ep_rkey_unpack(endpoint, key, &unpacked));
    free(key);
    ucp_rkey_buffer_release(packed);
    *peer_address = theirs[0];
    return unpacked;
}

/* Only memory allocated by UCX can be mapped into the peer by its shared-memory transport. */
static uint8_t *allocate(ucp_context_h context, size_t length, ucp_mem_h *memory)
{
    ucp_mem_map_params_t parameters = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS,
        .length = length, .flags = UCP_MEM_MAP_ALLOCATE,
    };
    ucp_mem_attr_t attributes = { .field_mask = UCP_MEM_ATTR_FIELD_ADDRESS };
    must("ucp_mem_map", ucp_mem_map(context, &parameters, memory));
    must("ucp_mem_query", ucp_mem_query(*memory, &attributes));
    memset(attributes.address, 0, length);
    return attributes.address;
}

void open_side(struct pair *pair, const char *path)
{
    setenv("UCX_TLS", strcmp(path, "tcp") ? "posix,cma,self" : "tcp,self", 1);
    setenv("UCX_NET_DEVICES", "lo", strcmp(path, "tcp") == 0);
    ucp_context_h context;
    ucp_config_t *config;
    must("ucp_config_read", ucp_config_read(NULL, NULL, &config));
    ucp_params_t parameters = {
        .field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_RMA,
    };
    must("ucp_init", ucp_init(&parameters, config, &context));
    ucp_config_release(config);
    ucp_worker_params_t worker_parameters = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE, .thread_mode = UCS_THREAD_MODE_SINGLE,
    };
    must("ucp_worker_create", ucp_worker_create(context, &worker_parameters, &worker));

    ucp_address_t *address;
    size_t length;
    uint8_t mine[1024] = { 0 }, theirs[1024];
    must("ucp_worker_get_address", ucp_worker_get_address(worker, &address, &length));
    if (length > sizeof mine)
        fail("ucp_worker_get_address", "the address exceeds 1024 bytes");
    memcpy(mine, address, length);
    exchange(pair, mine, theirs, sizeof mine);
    ucp_ep_params_t endpoint_parameters = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, .address = (ucp_address_t *)theirs,
    };
    must("ucp_ep_create", ucp_ep_create(worker, &endpoint_parameters, &endpoint));

    ucp_mem_h inbox, flag;
    pair->inbox = allocate(context, pair->region, &inbox);
    flags = (uint64_t *)allocate(context, 4096, &flag);
    expose(context, pair->source, pair->region);
    inbox_key = trade_key(pair, context, inbox, pair->inbox, &peer_inbox);
    flag_key = trade_key(pair, context, flag, flags, &peer_flag);
}

static ucs_status_ptr_t put(const void *from, size_t length, uint64_t to, ucp_rkey_h key)
{
    ucp_request_param_t parameters = { 0 };
    ucs_status_ptr_t request = ucp_put_nbx(endpoint, from, length, to, key, &parameters);
    if (UCS_PTR_IS_ERR(request))
        must("ucp_put_nbx", UCS_PTR_STATUS(request));
    return request;
}

void make_progress(void)
{
    ucp_worker_progress(worker);
}

static void finish(ucs_status_ptr_t request)
{
    if (request == NULL)
        return;
    while (ucp_request_check_status(request) == UCS_INPROGRESS)
        make_progress();
    must("ucp_put_nbx", ucp_request_check_status(request));
    ucp_request_free(request);
}

void send_message(struct pair *pair, size_t offset, size_t length)
{
    ucs_status_ptr_t bytes = put(pair->source + offset, length, peer_inbox + offset, inbox_key);
    must("ucp_worker_fence", ucp_worker_fence(worker));
    flags[8]++;
    ucs_status_ptr_t flag = put(&flags[8], sizeof *flags, peer_flag, flag_key);
    finish(bytes);
    finish(flag);
}

void receive_message(struct pair *pair, size_t offset, size_t length)
{
    (void)pair, (void)offset, (void)length;
    seen++;
    while (__atomic_load_n(&flags[0], __ATOMIC_ACQUIRE) < seen)
        make_progress();
}

int main(int count, char **arguments)
{
    return run_pair(count, arguments, "UCX", NULL);
}
