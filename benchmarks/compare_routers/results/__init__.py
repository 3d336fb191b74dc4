"""What is made of runs: rows, figures, ratios, tables, the report."""
