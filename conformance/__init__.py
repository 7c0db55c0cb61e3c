"""A suite that judges implementations of sharded checkpoints: this project's, and any other.

Read in this order: `implementation` (what is judged), `cases` (what a case is, and how cases are
drawn), `properties` (the laws), `machine` (save, overwrite, load, delete, verify in any order),
`crash` and `bucket` (the storage operations of a save, cut off anywhere, on files and in object
stores), `golden` (files that every reader of the format must take, and their corrupt twins that it
must refuse), `reader` (an independent reader of the format, in NumPy, JSON and zarr alone), `peers`
(this project and others in one table). `runs` does so for managers of a run: `runs.promises`.

It needs NumPy and Hypothesis, and what the implementation itself needs::

    python -m conformance --impl conformance.implementations.xckpt
"""
