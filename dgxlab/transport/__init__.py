"""Hosts: how to reach them, and what to ask of the agent there."""
