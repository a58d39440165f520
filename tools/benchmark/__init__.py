"""The parts of tools/bench.py: rows, load, processes, systems, and the report."""
