"""What is simulated to answer a question, and how the answer is shown."""
