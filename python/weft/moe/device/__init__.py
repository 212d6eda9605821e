"""Dispatch and combine between GPUs; `weft.cuda` exports these classes."""
