"""The mapping language: how the leaves of one model become those of another. Pure."""
