"""Hosts: connections to them, and calls of the agent there."""
