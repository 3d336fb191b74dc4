"""What tests of several rooms stand on: scripted peers, clients and builders, no tests."""
