"""Tests of dgxlab.transport."""
