"""The operation ``kv_quantize``: the layout of packed blocks, reference, and native where it is faster."""
