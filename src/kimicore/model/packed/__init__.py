"""Weights that stay in the codes of their files, and the rounding that makes such codes."""
