/* See ofi.h. The receiver has seen a message when its completion queue has the data. Paths: shm and ofi-shm
 * (shm), tcp and ofi-tcp (tcp;ofi_rxm). */

#include "ofi.h"

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdio.h>
#include <string.h>

static struct fid_ep *endpoint;
static struct fid_cq *queue;
static fi_addr_t peer;
static void *source_key;
static uint64_t peer_base, peer_key;
/* Arrivals not taken yet. */
static size_t arrived;
/* Write contexts, each for one write at a time. */
#define UNDER_WAY 1024
static struct fi_context2 contexts[UNDER_WAY];
static void *unused[UNDER_WAY];
static size_t unused_count;
/* Newest API version whose layouts Weft declares. */
#define NEWEST FI_VERSION(1, 21)

static void must(const char *what, ssize_t result)
{
    if (result < 0)
        fail(what, fi_strerror((int)-result));
}

void make_progress(void)
{
    struct fi_cq_data_entry entries[8];
    ssize_t count = fi_cq_read(queue, entries, 8);
    if (count == -FI_EAGAIN)
        return;
    must("fi_cq_read", count);
    for (ssize_t index = 0; index < count; index++) {
        if (entries[index].flags & FI_REMOTE_CQ_DATA)
            arrived++;
        else
            unused[unused_count++] = entries[index].op_context;
    }
}

void open_side(struct pair *pair, const char *path)
{
    for (; unused_count < UNDER_WAY; unused_count++)
        unused[unused_count] = &contexts[unused_count];
    struct fi_info *hints = fi_allocinfo(), *info;
    hints->caps = FI_MSG | FI_RMA | FI_WRITE | FI_REMOTE_WRITE;
    hints->ep_attr->type = FI_EP_RDM;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->domain_attr->mr_mode =
        FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_SAFE;
    int is_tcp = strstr(path, "tcp") != NULL;
    hints->fabric_attr->prov_name = strdup(is_tcp ? "tcp;ofi_rxm" : "shm");
    const char *node = is_tcp ? "127.0.0.1" : NULL;
    uint32_t api = fi_version() < NEWEST ? fi_version() : NEWEST;
    must("fi_getinfo", fi_getinfo(api, node, NULL, node ? FI_SOURCE : 0, hints, &info));

    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_av *addresses;
    must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
    must("fi_domain", fi_domain(fabric, info, &domain, NULL));
    struct fi_cq_attr queue_attributes = { .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_NONE };
    must("fi_cq_open", fi_cq_open(domain, &queue_attributes, &queue, NULL));
    struct fi_av_attr address_attributes = { .type = FI_AV_TABLE };
    must("fi_av_open", fi_av_open(domain, &address_attributes, &addresses, NULL));
    must("fi_endpoint", fi_endpoint(domain, info, &endpoint, NULL));
    must("fi_ep_bind", fi_ep_bind(endpoint, &addresses->fid, 0));
    must("fi_ep_bind", fi_ep_bind(endpoint, &queue->fid, FI_TRANSMIT | FI_RECV));
    must("fi_enable", fi_enable(endpoint));

    struct fid_mr *source, *inbox;
    must("fi_mr_reg", fi_mr_reg(domain, pair->source, pair->region, FI_WRITE, 0, 1, 0, &source, NULL));
    must("fi_mr_reg",
         fi_mr_reg(domain, pair->inbox, pair->region, FI_REMOTE_WRITE, 0, 2, 0, &inbox, NULL));
    source_key = fi_mr_desc(source);

    uint8_t mine[256] = { 0 }, theirs[256];
    size_t length = sizeof mine;
    must("fi_getname", fi_getname(&endpoint->fid, mine, &length));
    exchange(pair, mine, theirs, sizeof mine);
    if (fi_av_insert(addresses, theirs, 1, &peer, 0, NULL) != 1)
        fail("fi_av_insert", "the address was not taken");
    int virtual = info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
    uint64_t memory[2] = { virtual ? (uint64_t)pair->inbox : 0, fi_mr_key(inbox) }, its[2];
    exchange(pair, memory, its, sizeof memory);
    peer_base = its[0];
    peer_key = its[1];
}

void write_from_to(struct pair *pair, size_t from, size_t to, size_t length)
{
    struct iovec local = { pair->source + from, length };
    struct fi_rma_iov remote = { peer_base + to, length, peer_key };
    while (unused_count == 0)
        make_progress();
    struct fi_msg_rma message = {
        .msg_iov = &local, .desc = &source_key, .iov_count = 1, .addr = peer, .rma_iov = &remote,
        .rma_iov_count = 1, .context = unused[--unused_count], .data = 1,
    };
    ssize_t result;
    while ((result = fi_writemsg(endpoint, &message, FI_REMOTE_CQ_DATA | FI_COMPLETION)) == -FI_EAGAIN)
        make_progress();
    must("fi_writemsg", result);
}

size_t take_arrivals(void)
{
    size_t count = arrived;
    arrived = 0;
    return count;
}
