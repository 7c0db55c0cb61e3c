"""The pure core: values and functions that plan a checkpoint, without a framework or a file.

Read in this order: `metadata` (the words), `geometry` (boxes, and boxes to zarr chunks), `tree` and
`adapter` (what a state is), `plan` (what ranks exchange, and the planners that decide), `targets`
(what a load fills), `manifest` (what is written down), `commit` (how it becomes visible).
"""
