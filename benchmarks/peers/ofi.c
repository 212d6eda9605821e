/* libfabric: fi_writemsg with remote CQ data over an RDM endpoint. The receiver has seen a message when
 * its completion queue has the data. Paths: shm, tcp (tcp;ofi_rxm). */

#include "pair.h"

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <string.h>

static struct fid_ep *endpoint;
static struct fid_cq *queue;
static fi_addr_t peer;
static void *source_key;
static uint64_t peer_base, peer_key;
/* Completions of our own writes, and arrivals, that were not waited for yet. */
static int written, arrived;

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
            written++;
    }
}

void open_side(struct pair *pair, const char *path)
{
    struct fi_info *hints = fi_allocinfo(), *info;
    hints->caps = FI_MSG | FI_RMA | FI_WRITE | FI_REMOTE_WRITE;
    hints->ep_attr->type = FI_EP_RDM;
    hints->mode = FI_CONTEXT;
    hints->domain_attr->mr_mode =
        FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_SAFE;
    hints->fabric_attr->prov_name = strdup(strcmp(path, "tcp") ? "shm" : "tcp;ofi_rxm");
    const char *node = strcmp(path, "tcp") ? NULL : "127.0.0.1";
    must("fi_getinfo", fi_getinfo(FI_VERSION(1, 15), node, NULL, node ? FI_SOURCE : 0, hints, &info));

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

void send_message(struct pair *pair, size_t offset, size_t length)
{
    static struct fi_context context;
    struct iovec local = { pair->source + offset, length };
    struct fi_rma_iov remote = { peer_base + offset, length, peer_key };
    struct fi_msg_rma message = {
        .msg_iov = &local, .desc = &source_key, .iov_count = 1, .addr = peer, .rma_iov = &remote,
        .rma_iov_count = 1, .context = &context, .data = 1,
    };
    ssize_t result;
    static int started;
    /* The context belongs to one write at a time. */
    while (written < started)
        make_progress();
    while ((result = fi_writemsg(endpoint, &message, FI_REMOTE_CQ_DATA | FI_COMPLETION)) == -FI_EAGAIN)
        make_progress();
    must("fi_writemsg", result);
    started++;
}

void receive_message(struct pair *pair, size_t offset, size_t length)
{
    (void)pair, (void)offset, (void)length;
    while (arrived == 0)
        make_progress();
    arrived--;
}

int main(int count, char **arguments)
{
    return run_pair(count, arguments, "libfabric");
}
