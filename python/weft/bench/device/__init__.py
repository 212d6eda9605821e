"""Measurements of `weft bench moe --device cuda` on each rank.

`cases` lists them, the most important first; `rounds` captures rounds of dispatch and combine and
times them; `check` compares every result with a reference; `beside` is NCCL with the same bytes;
`measures` has a function for each kind of case; `summary` merges the figures from all ranks.
"""
