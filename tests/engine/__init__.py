"""The engine at its public face."""
