"""Padding policies: which shapes a step may run at."""
