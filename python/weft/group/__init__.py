"""Groups: the communicator, with regions, counters and requests; pairs; rendezvous."""
