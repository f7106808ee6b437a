"""Eviction policies: which cached block goes when memory is needed."""
