"""Tests of the fault campaign."""
