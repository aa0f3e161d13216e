"""Tests of synthetic models."""
