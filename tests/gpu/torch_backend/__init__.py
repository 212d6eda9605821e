"""Ranks in torch.distributed's backend `weft` on GPUs, and their functions."""
