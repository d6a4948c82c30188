"""Batching policies and rewrites: pure functions from form to form, one a file."""
