"""Takes the pictures of the dashboard in docs/, of a simulated cluster."""
