"""Loops in one pass over memory, compiled by numba (`pip install 'proxmo[fast]'`).

`step` has the step of `ProxSGD(fused=True)`, `elementwise` the prox of an element and `rows` that of a group for every
penalty that has one, `compiled` what they share. All of it gives what the plain path gives, up to rounding; what it
cannot take is left to the plain path. Nothing outside imports it before a fused step is asked for.
"""
