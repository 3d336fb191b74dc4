"""Results of runs: rows, figures, ratios, tables, the report."""
