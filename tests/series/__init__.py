"""Patch series: reading, applying, keeping in order."""
