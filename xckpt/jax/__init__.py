"""jax's door: the only package of xckpt that imports jax."""
