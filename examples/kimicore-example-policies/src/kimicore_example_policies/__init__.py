"""Two policies for KimiCore, as an example of a package of them."""
