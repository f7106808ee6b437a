"""The operation ``rotary_write``: reference, and native where it is faster."""
