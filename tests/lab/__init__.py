"""The laboratories: network namespaces, and guests with RDMA devices."""
