"""Batching policies: in which order requests get the tokens of a step."""
