"""Stalls that the kernel injects into a real torch job, recorded with the truth beside them.

    python -m stalls.run fuse_read --strength medium -o out         (as root, with torch)

A folder a kind: what is injected, how strongly, and what the stall is to be charged to. The job's
GPU work runs on the virtual GPU, whose own timeline is the truth; the job's host work is real.
"""
