"""The threads that native kernels run on."""
