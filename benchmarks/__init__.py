"""Measurements of fxbatch beside what a user would do instead."""
