"""The operation ``key_summary``: reference, and native where it is faster."""
