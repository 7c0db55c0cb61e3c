"""Coverage-guided fuzzing of what reads bytes that others have written: see ``__main__.py``."""
