"""Tests of reading what tools printed elsewhere."""
