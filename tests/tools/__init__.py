"""Tests of the parsers, on real output."""
