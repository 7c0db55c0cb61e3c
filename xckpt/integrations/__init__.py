"""Hooks for trainers: each module is one trainer's, and the only one that imports its package.

Importing a module works without the package; its classes then raise an error that names what to
install. `docs/integrations.md` lists them; each has a page in `docs/trainers`.
"""
