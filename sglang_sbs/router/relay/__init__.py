"""A request on its way: both legs, retries, aborts, and the answer."""
