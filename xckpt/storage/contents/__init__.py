"""What checkpoints hold, for people who look: slab by slab, compared, counted, as text."""
