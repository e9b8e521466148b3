"""Profiler traces of PyTorch (Kineto): read, partitioned exactly, turned into evidence."""
