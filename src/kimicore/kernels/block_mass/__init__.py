"""The operation ``block_mass``: reference, and native where it is faster."""
