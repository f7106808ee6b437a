"""Models with fewer layers: how much each layer does, and folders without those that do least."""
