"""The functions that people call with a path; a module for each kind of call."""
