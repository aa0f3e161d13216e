"""The agent, which runs on the host: standard library only, Python 3.10 syntax, sent as one zipapp."""
