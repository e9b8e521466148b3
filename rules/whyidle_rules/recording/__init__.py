"""From a recording to evidence and a diagnosis: samples, counters and pages on GPU windows."""
