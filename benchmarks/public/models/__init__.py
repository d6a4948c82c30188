"""A file a public model: where it is from, what had to be edited, a driver, and made-up data."""
