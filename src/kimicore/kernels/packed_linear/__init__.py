"""Product with a weight that is kept in integers of 4 to 8 bits."""
