"""Precision maps: which module keeps which precision."""
