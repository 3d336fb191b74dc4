"""Helpers for tests of several rooms: scripted peers, clients and builders, no tests."""
