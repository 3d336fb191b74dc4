"""What is made of runs: rows, figures, ratios, tables, pictures, the report."""
