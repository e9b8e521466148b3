"""What the probe keeps to itself, where another program would raise."""

from __future__ import annotations

# What a bug of ours, or an unknown torch, raises. RuntimeError and OSError are not among them: a
# signal handler of the trainer may raise those inside our code, and they are the trainer's.
OURS = (ArithmeticError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError)
