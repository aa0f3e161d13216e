"""How fast this program itself is, measured against what it could cost at least; `make bench` prints the figures."""
