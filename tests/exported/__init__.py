"""Tests of handing on what was measured."""
