"""What runs on the node: clock, host, collectors, sampler, keeper. Imports nothing of the rules."""
