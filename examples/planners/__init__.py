"""Planners to paste and change: each file is one way to extend the defaults, and needs no other."""
