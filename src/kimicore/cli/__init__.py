"""The command line: ``kimicore``."""
