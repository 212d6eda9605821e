"""The torch.distributed backend (`weft.torch`)."""
