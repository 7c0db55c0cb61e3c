"""Planning a save without the other ranks' plans, where this rank knows what they are."""
