"""A part of a checkpoint as if it were one: which leaves are in it, and a load of them."""
