"""Ranks of one host hand each other chunks through shared memory."""
