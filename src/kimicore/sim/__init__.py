"""Replaying traffic through the policies and the scheduler that the engine runs."""
