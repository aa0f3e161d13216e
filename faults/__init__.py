"""The fault campaign: inject faults (network, crash, disk, hostile files) many times, and check what must hold."""
