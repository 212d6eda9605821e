"""Weft's all-to-all behind the interfaces of inference engines.

- `weft.adapters.vllm`: prepare and finalize of vLLM's modular kernels
- `weft.adapters.sglang`: a token dispatcher of SGLang

Each imports its engine, so neither is imported with `weft`. See docs/coming-from-deepep.md.
"""
