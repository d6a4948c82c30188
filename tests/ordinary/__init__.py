"""Ordinary Python around models: odd forwards, state, and changes between calls, each against the undecorated loop."""
