"""Options that several commands share, as they are typed."""
