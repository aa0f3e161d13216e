"""Tests of what runs on the host."""
