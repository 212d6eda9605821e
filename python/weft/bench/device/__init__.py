"""Measurements of `weft bench moe --device cuda` on each rank.

`cases` lists them, the most important first; `rounds` captures rounds of dispatch and combine and
times them; `check` holds every result to a reference; `beside` is NCCL with the same bytes;
`measures` has a function for each kind of case; `summary` makes one of what all ranks saw.
"""
