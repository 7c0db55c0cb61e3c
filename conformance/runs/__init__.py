"""Managers of a run's checkpoints, judged by what a run must be able to rely on."""
