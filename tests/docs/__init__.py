"""Tests of the site and of the pages that have no test of their own."""
