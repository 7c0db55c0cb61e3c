"""Checkpoints as a page for a browser, for `xckpt view` and `xckpt.view`.

1. `xckpt.viewer.model` describes the page: compact columns, which travel as JSON.
2. `leaves`, `run`, `diff` and `plan` describe a checkpoint, a run, two checkpoints, and a reader
   with another mesh; they are pure functions.
3. `page` puts a description into one HTML file, with the style and the scripts of `files`; nothing
   in it is ever loaded from elsewhere.
4. `server` serves the page to this machine alone, and the values of a slice on request.
"""
