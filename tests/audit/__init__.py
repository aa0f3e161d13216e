"""Tests of the whole record: what is wrong with it, and what becomes of two."""
