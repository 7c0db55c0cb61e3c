"""The manifest: what it holds, how it is spelled, and what makes one invalid."""
