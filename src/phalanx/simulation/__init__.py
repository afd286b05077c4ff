"""Whole swarms in one process: scenarios, faults and attacks from a seed, and checkers that look from outside."""
