"""What the leaves of a target tree ask for."""
