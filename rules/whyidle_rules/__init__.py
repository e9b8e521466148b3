"""What decides: evidence, rules, ledger, root causes, traces, report."""
