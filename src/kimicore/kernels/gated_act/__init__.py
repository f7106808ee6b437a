"""The operation ``gated_act``: reference, and native where it is faster."""
