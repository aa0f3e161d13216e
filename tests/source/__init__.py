"""Pins: where they come from and how they travel."""
