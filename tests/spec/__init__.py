"""Tests of dgxlab.spec."""
