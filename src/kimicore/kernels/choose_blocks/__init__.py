"""The operation ``choose_blocks``: reference, and native where it is faster."""
