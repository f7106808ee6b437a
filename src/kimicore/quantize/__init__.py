"""Quantizing a model: rounding its weights with an eye on what goes through them, and writing the result."""
