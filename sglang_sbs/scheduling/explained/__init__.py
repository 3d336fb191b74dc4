"""Records the decisions about each request, and explains its waits and its place on request."""
