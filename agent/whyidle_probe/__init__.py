"""In-process probe for the trainer: standard library only, Python 3.9 and later."""
