"""The fault campaign: what a bad network, a crash, a full disk or a hostile file must never do, tried many times."""
