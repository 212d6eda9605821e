"""Communicators, pairs, memory and loss, over every provider."""
