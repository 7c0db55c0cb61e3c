"""What holds for every implementation: laws that are tried on random cases."""
