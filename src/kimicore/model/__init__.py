"""Model families: files, weights, the forward pass and sampling."""
