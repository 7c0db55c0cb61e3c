"""Plans for a checkpoint and another mesh: which rank would read, write and hand over what.

`mesh_text` parses the mesh and the specs; `load` and `save` ask the planner's own
functions. All of it is pure: no data is read.
"""
