"""`python -m fmoe_ext.gpu prove`: which of our kernels a GPU computes right and fast, found out on that GPU."""
