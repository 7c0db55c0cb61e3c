"""The pure core: values and functions that plan a checkpoint, without a framework or a file.

Read in this order: `metadata` (the words), `boxes` (the algebra), `grid` (boxes to zarr chunks),
`plan` (what is exchanged between ranks), `save_planner` and `load_planner` (the decisions),
`manifest` (what is written down).
"""
