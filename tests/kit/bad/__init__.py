"""Policies that each break one promise, and a good twin of each kind."""
