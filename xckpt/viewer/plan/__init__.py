"""Saved as this, loaded as that: who would read, write and hand over what.

`mesh_text` reads the mesh and the specs that one types; `load` and `save` ask the planner's own
functions. All of it is pure: no data is read.
"""
