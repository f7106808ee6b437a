"""Built-in policies, one module each; chosen by name and imported only then."""
