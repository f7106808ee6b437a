"""The operation ``paged_attention``: reference, and native where it is faster."""
