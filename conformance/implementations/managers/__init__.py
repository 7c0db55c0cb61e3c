"""Managers for `conformance.runs`: ours, peers, the smallest correct one, faulty ones."""
