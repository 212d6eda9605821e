"""What `weft bench moe --device cuda` measures, on each rank.

`cases` says what, the most important first; `rounds` captures rounds of dispatch and combine and
times them; `check` holds every result to a reference; `beside` is NCCL with the same bytes;
`measures` has a function for each kind of case; `summary` makes one of what all ranks saw.
"""
