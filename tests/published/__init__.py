"""Tests of dgxlab.published."""
