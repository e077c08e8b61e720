"""Benchmarks beside their peers: every figure comes from one run, in alternating rounds."""
