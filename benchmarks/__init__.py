"""Benchmarks of xckpt beside the checkpoint libraries that people use today.

``python -m benchmarks.run`` (or ``make bench``) runs all of them, prints tables and writes
``benchmarks/results.json``.  Every figure is a ratio of medians from one run.
"""
