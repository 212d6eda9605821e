"""Fused-operator substitution in torch.compile's graphs."""
