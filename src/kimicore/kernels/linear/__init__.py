"""The operation ``linear``: reference, and native where it is faster."""
