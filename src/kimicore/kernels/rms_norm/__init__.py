"""The operation ``rms_norm``: reference, and native where it is faster."""
