"""Tests of dgxlab.plots."""
