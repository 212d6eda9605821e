"""Ranks of the backend `weft` of torch.distributed on GPUs, and what they do."""
