/* Transport of libfabric's programs: fi_writemsg with remote CQ data over an RDM endpoint. */

#ifndef OFI_H
#define OFI_H

#include "pair.h"

/* Starts a write of bytes at an offset of the source to an offset of the peer's inbox. */
void write_from_to(struct pair *pair, size_t from, size_t to, size_t length);
/* Number of messages that have arrived since the last call. */
size_t take_arrivals(void);

#endif
