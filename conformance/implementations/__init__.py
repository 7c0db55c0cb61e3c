"""What the suite has been taught to judge; only these modules import what they judge.

`xckpt` through NumPy memory, `xckpt_torch` and `xckpt_jax` through those frameworks, `crossed`
(saved through one, loaded through another), `reader` (xckpt saves, the independent reader loads),
and the peers: `torch_dcp`, `orbax`.
"""
