"""A small package with the part of the interface of verifiers 0.4 that hone and `tasksets/` use, for the tests."""
