"""Rules while a node records: the keeper's evaluator, and the ledger that it settled."""
