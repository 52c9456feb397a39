"""The kernels of the triton backend, and how a call launches them."""
