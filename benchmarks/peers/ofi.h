/* Transport for the libfabric programs: fi_writemsg with remote CQ data over an RDM endpoint. */

#ifndef OFI_H
#define OFI_H

#include "pair.h"

/* Starts a write from a source offset to an offset in the peer's inbox. */
void write_from_to(struct pair *pair, size_t from, size_t to, size_t length);
/* Counts the messages that have arrived since the last call. */
size_t take_arrivals(void);

#endif
