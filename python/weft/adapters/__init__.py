"""Weft's all-to-all behind the interfaces that inference engines define.

- `weft.adapters.vllm`: prepare and finalize for vLLM's modular kernels
- `weft.adapters.sglang`: a token dispatcher for SGLang

Each imports an engine, so neither is imported with `weft`. See docs/coming-from-deepep.md.
"""
