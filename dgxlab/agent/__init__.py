"""What runs on the host: standard library only, Python 3.10 syntax, carried there as one zipapp."""
