"""Tests of dgxlab."""
