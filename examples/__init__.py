"""Runnable examples; `python -m examples.demo` is the one to start with."""
