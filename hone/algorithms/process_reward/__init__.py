"""Implicit process rewards (PRIME): `settings`, then `losses`."""
