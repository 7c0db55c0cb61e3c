"""The steps of a save and of a load, and what they run on: groups, adapters, background saves."""
