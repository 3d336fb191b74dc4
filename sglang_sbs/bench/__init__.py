"""Load on a running cluster, and what came of it. Sees the router through HTTP and its log only."""
