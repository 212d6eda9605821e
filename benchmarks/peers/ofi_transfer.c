/* Messages over bare libfabric. `ofi --version` prints the library's version. */

#include "ofi.h"

#include <rdma/fabric.h>
#include <stdio.h>
#include <string.h>

void send_message(struct pair *pair, size_t offset, size_t length)
{
    write_from_to(pair, offset, offset, length);
}

static void await_arrivals(struct pair *pair, size_t count)
{
    static size_t arrived;
    (void)pair;
    for (arrived += take_arrivals(); arrived < count; arrived += take_arrivals())
        make_progress();
    arrived -= count;
}

void receive_message(struct pair *pair, size_t offset, size_t length)
{
    (void)offset, (void)length;
    await_arrivals(pair, 1);
}

static void acknowledge(struct pair *pair)
{
    send_message(pair, 0, 0);
}

static const struct stream stream = {
    .send = send_message,
    .receive = await_arrivals,
    .acknowledge = acknowledge,
    .await_acknowledged = await_arrivals,
};

int main(int count, char **arguments)
{
    if (count == 2 && strcmp(arguments[1], "--version") == 0)
        return puts(fi_tostr("", FI_TYPE_VERSION)) < 0;
    return run_pair(count, arguments, "libfabric", &stream);
}
