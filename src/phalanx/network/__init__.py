"""What carries a peer's effects out: links, clocks and disks, simulated or real."""
