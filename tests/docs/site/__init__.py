"""Tests of the built site: `make test-docs`."""
